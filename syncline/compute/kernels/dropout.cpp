// Dropout with masks that are a function of counters: Philox4x32-10 (Salmon, Moraes, Dror & Shaw, Parallel Random
// Numbers: As Easy as 1, 2, 3, SC 2011).
//
// The counter holds a block and a sample, the key is of one call of dropout. A block has four words. Element e of a
// sample takes word (e % 64) / 16 of block e / 64 * 16 + e % 16, so that 16 neighbors are computed side by side and
// stored as they are. The backward pass computes the mask again, which takes less time than reading a stored one of
// floats, and no memory. `dropout.py` has the same function in torch.

#include <stdint.h>

namespace {

constexpr int LANES = 16, GROUP = 4 * LANES, ROUNDS = 10;
constexpr uint32_t FACTOR_0 = 0xD2511F53, FACTOR_1 = 0xCD9E8D57, STEP_0 = 0x9E3779B9, STEP_1 = 0xBB67AE85;

// The words of 16 blocks from number `first` on, in the order of the elements.
inline void draw(uint64_t first, uint64_t sample, uint32_t key_0, uint32_t key_1, uint32_t *words) {
    // 64 bits for each word, of which the lower half counts: the multiplication of processors takes them so.
    uint64_t a[LANES], b[LANES], c[LANES], d[LANES];
    for (int i = 0; i < LANES; i++) {
        const uint64_t block = first + i;
        a[i] = (uint32_t)block, b[i] = block >> 32, c[i] = (uint32_t)sample, d[i] = sample >> 32;
    }
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < LANES; i++) {
            const uint64_t left = FACTOR_0 * (uint64_t)(uint32_t)a[i], right = FACTOR_1 * (uint64_t)(uint32_t)c[i];
            a[i] = (right >> 32) ^ b[i] ^ key_0;
            b[i] = right;
            c[i] = (left >> 32) ^ d[i] ^ key_1;
            d[i] = left;
        }
        key_0 += STEP_0, key_1 += STEP_1;
    }
    for (int i = 0; i < LANES; i++) {
        words[i] = a[i], words[LANES + i] = b[i], words[2 * LANES + i] = c[i], words[3 * LANES + i] = d[i];
    }
}

// bfloat16 as its bits.
struct Half {
    uint16_t bits;
};

inline float value(float x) { return x; }
inline double value(double x) { return x; }
inline float value(Half x) {
    const uint32_t bits = (uint32_t)x.bits << 16;
    float number;
    __builtin_memcpy(&number, &bits, sizeof number);
    return number;
}

inline void put(float &to, float x) { to = x; }
inline void put(double &to, double x) { to = x; }
// Rounded to the nearest, of two to the even one, as torch does; not a number stays so.
inline void put(Half &to, float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    to.bits = (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded;
}

struct Draw {
    uint32_t key_0, key_1, least;
    double scale;
};

template <class Number, class Wide>
void drop_row(const Draw &draw_of, uint64_t sample, const Number *x, Number *y, long count) {
    const Wide scale = draw_of.scale;
    for (long start = 0; start < count; start += GROUP) {
        uint32_t words[GROUP];
        draw(start / GROUP * LANES, sample, draw_of.key_0, draw_of.key_1, words);
        const int size = count - start < GROUP ? count - start : GROUP;
        // Multiplied, as in torch: what is not a number, or infinite, does not disappear.
        if (x && size == GROUP)
            for (int i = 0; i < GROUP; i++) put(y[start + i], value(x[start + i]) * (words[i] >= draw_of.least ? scale : 0));
        else
            for (int i = 0; i < size; i++)
                put(y[start + i], (x ? value(x[start + i]) : 1) * (words[i] >= draw_of.least ? scale : 0));
    }
}

template <class Number, class Wide>
void drop(const Draw &draw_of, const int64_t *samples, long rows, long length, const Number *x, Number *y, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long row = 0; row < rows; row++)
        drop_row<Number, Wide>(draw_of, samples[row], x ? x + row * length : nullptr, y + row * length, length);
}

}  // namespace

extern "C" {

// `y` = `x` with some elements zero and the others times `scale`; row r is of sample `samples[r]`. An element stays if
// its word is at least `least`. Without `x`: of ones.
void drop_float(uint32_t key_0, uint32_t key_1, uint32_t least, double scale, const int64_t *samples, long rows,
                long length, const float *x, float *y, int threads) {
    drop<float, float>({key_0, key_1, least, scale}, samples, rows, length, x, y, threads);
}

void drop_double(uint32_t key_0, uint32_t key_1, uint32_t least, double scale, const int64_t *samples, long rows,
                 long length, const double *x, double *y, int threads) {
    drop<double, double>({key_0, key_1, least, scale}, samples, rows, length, x, y, threads);
}

void drop_bfloat16(uint32_t key_0, uint32_t key_1, uint32_t least, double scale, const int64_t *samples, long rows,
                   long length, const Half *x, Half *y, int threads) {
    drop<Half, float>({key_0, key_1, least, scale}, samples, rows, length, x, y, threads);
}

}  // extern "C"
