// Products of small matrices that stay in registers, for code that cuts its work into panels.
//
// The innermost loops multiply ROWS x (VECS * 8) numbers that stay in registers; operands that are read repeatedly are
// cut into panels that fit into the L1 cache. Nothing here depends on a particular processor: the vectors are the
// compiler's.

#pragma once

#include <stdlib.h>
#include <string.h>

#include <new>

namespace {

typedef float Vec __attribute__((vector_size(32)));
typedef float LooseVec __attribute__((vector_size(32), aligned(4), may_alias));

constexpr int WIDTH = 8;    // floats in a vector
constexpr int WIDEST = 3;   // vectors in a panel: 4 rows of 3 vectors, 3 operands and a factor fill 16 registers
constexpr int DEPTH = 256;  // of a panel: 24 KB

#if defined(__x86_64__)
#define KEEP_IN_REGISTER(v) asm("" : "+x"(v))  // otherwise gcc reloads it from memory for each use
#else
#define KEEP_IN_REGISTER(v)
#endif
#define ALONE __attribute__((noinline))  // if inlined, the surrounding loops take the registers that these need

inline Vec load(const float *at) { return *reinterpret_cast<const LooseVec *>(at); }
inline void store(float *at, Vec v) { *reinterpret_cast<LooseVec *>(at) = v; }
inline int least(int a, int b) { return a < b ? a : b; }
inline int most(int a, int b) { return a > b ? a : b; }
inline int whole(int floats) { return (floats + WIDTH - 1) / WIDTH * WIDTH; }

// Scratch memory for one call; throws std::bad_alloc.
template <class T>
struct Array {
    T *at;
    explicit Array(size_t count, bool is_zero = false) {
        const size_t bytes = count * sizeof(T) + sizeof(Vec);  // the last vector may overrun the end
        at = static_cast<T *>(aligned_alloc(64, (bytes + 63) / 64 * 64));
        if (!at) throw std::bad_alloc();
        if (is_zero) memset(at, 0, bytes);
    }
    ~Array() { free(at); }
    Array(const Array &) = delete;
    Array &operator=(const Array &) = delete;
};

struct Floats : Array<float> {
    explicit Floats(size_t count, bool are_zero = true) : Array(count, are_zero) {}
};

// The return code for Python: 0, or 1 if there was not enough memory, the only possible failure.
template <class Compute>
inline int status_of(const Compute &compute) {
    try {
        compute();
        return 0;
    } catch (const std::bad_alloc &) {
        return 1;
    }
}

// The next panel of a matrix with so many vectors left: 3 of them, but rather 2 and 2 than 3 and 1.
inline int panel_of(int vecs) { return vecs == 4 ? 2 : least(vecs, WIDEST); }

#define FOR_PANELS(begin, vecs, floats) \
    for (int begin = 0, vecs = panel_of(whole(floats) / WIDTH); begin < (floats); \
         begin += vecs * WIDTH, vecs = panel_of((whole(floats) - begin) / WIDTH))

// sums[i] (+)= product of row i, which has `parts` of `length` floats, with a panel.
template <int ROWS, int VECS>
ALONE void multiply(const float *const *rows, long offset, int parts, long apart, int length, const float *panel,
                    float *const *sums, long sums_offset, bool adds_first, bool adds_last) {
    Vec sum[ROWS][VECS];
    for (int i = 0; i < ROWS; i++)
        for (int v = 0; v < VECS; v++) sum[i][v] = adds_first ? load(sums[i] + sums_offset + v * WIDTH) : Vec{};
    for (int part = 0; part < parts; part++) {
        const float *row[ROWS];
        for (int i = 0; i < ROWS; i++) row[i] = rows[i] + offset + part * apart;
        for (int k = 0; k < length; k++, panel += VECS * WIDTH) {
            Vec operand[VECS];
            for (int v = 0; v < VECS; v++) {
                operand[v] = load(panel + v * WIDTH);
                KEEP_IN_REGISTER(operand[v]);
            }
            for (int i = 0; i < ROWS; i++)
                for (int v = 0; v < VECS; v++) sum[i][v] += row[i][k] * operand[v];
        }
    }
    // Rows of an input gradient overlap: a row is read only after the previous one is written.
    for (int i = 0; i < ROWS; i++)
        for (int v = 0; v < VECS; v++) {
            float *to = sums[i] + sums_offset + v * WIDTH;
            store(to, adds_last ? load(to) + sum[i][v] : sum[i][v]);
        }
}

template <int VECS>
void multiply_all(const float *const *rows, int count, long offset, int parts, long apart, int length,
                  const float *panel, float *const *sums, long sums_offset, bool adds_first, bool adds_last) {
    constexpr int MANY = VECS == 1 ? 8 : VECS == 2 ? 6 : 4;
    int i = 0;
#define MULTIPLY(ROWS) \
    for (; i + ROWS <= count; i += ROWS) \
        multiply<ROWS, VECS>(rows + i, offset, parts, apart, length, panel, sums + i, sums_offset, adds_first, adds_last);
    MULTIPLY(MANY)
    MULTIPLY(2)
    MULTIPLY(1)
#undef MULTIPLY
}

void multiply_panel(int vecs, const float *const *rows, int count, long offset, int parts, long apart, int length,
                    const float *panel, float *const *sums, long sums_offset, bool adds_first, bool adds_last) {
    const auto multiply_these = vecs == 3 ? multiply_all<3> : vecs == 2 ? multiply_all<2> : multiply_all<1>;
    multiply_these(rows, count, offset, parts, apart, length, panel, sums, sums_offset, adds_first, adds_last);
}

constexpr int COLUMNS = 4;  // outputs whose weight gradients are summed at once

// sums[o][0 : 8 VECS] += sum over pixels of columns[pixel][o] * runs[pixel][0 : 8 VECS], for OUTPUTS outputs.
template <int OUTPUTS, int VECS>
ALONE void add_outer(const float *columns, int pixels, const float *runs, float *sums) {
    Vec sum[OUTPUTS][VECS];
    for (int o = 0; o < OUTPUTS; o++)
        for (int v = 0; v < VECS; v++) sum[o][v] = load(sums + (o * VECS + v) * WIDTH);
    for (int p = 0; p < pixels; p++, columns += OUTPUTS, runs += VECS * WIDTH) {
        Vec operand[VECS];
        for (int v = 0; v < VECS; v++) {
            operand[v] = load(runs + v * WIDTH);
            KEEP_IN_REGISTER(operand[v]);
        }
        for (int o = 0; o < OUTPUTS; o++)
            for (int v = 0; v < VECS; v++) sum[o][v] += columns[o] * operand[v];
    }
    for (int o = 0; o < OUTPUTS; o++)
        for (int v = 0; v < VECS; v++) store(sums + (o * VECS + v) * WIDTH, sum[o][v]);
}

// Where the vectors of one pixel begin, if it has at least one: the last one overlaps the one before.
inline int next_vector(int at, int floats) {
    return at + 2 * WIDTH <= floats || at + WIDTH >= floats ? at + WIDTH : floats - WIDTH;
}

// The sum of some pixels.
inline void add_up(const float *pixels, long count, int channels, float *sum) {
    if (channels < WIDTH) {
        memset(sum, 0, channels * sizeof(float));
        for (long p = 0; p < count; p++)
            for (int c = 0; c < channels; c++) sum[c] += pixels[p * channels + c];
        return;
    }
    for (int c = 0; c < channels; c = next_vector(c, channels)) {
        Vec some[4] = {};  // four independent sums, to hide latency
        long p = 0;
        for (; p + 4 <= count; p += 4)
            for (int i = 0; i < 4; i++) some[i] += load(pixels + (p + i) * channels + c);
        for (; p < count; p++) some[0] += load(pixels + p * channels + c);
        store(sum + c, some[0] + some[1] + (some[2] + some[3]));
    }
}

}  // namespace
