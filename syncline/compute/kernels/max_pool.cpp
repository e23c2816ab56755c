// Max pooling of channels-last images in float32, on one thread, for adjacent windows that do not overlap.
//
// The position of the maximum in a window is stored in one byte, where torch uses eight; the gradient is written in one
// pass over memory, zeros included.

#include <stdint.h>
#include <string.h>

namespace {

constexpr int WIDTH = 8;
typedef float Vec __attribute__((vector_size(32)));
typedef float LooseVec __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(8)));
typedef int8_t LooseBytes __attribute__((vector_size(8), aligned(1), may_alias));

// Where the vectors of one pixel begin: the last one overlaps the one before instead of being shorter.
inline int next(int c, int channels) { return c + 2 * WIDTH <= channels || c + WIDTH >= channels ? c + WIDTH : channels - WIDTH; }

}  // namespace

// The sizes that Python passes. Rows and columns that fill no window are ignored.
struct PoolShape {
    int samples, height, width, channels, window_height, window_width;
};

extern "C" {

// As in torch: the first of equal values wins, and NaN is larger than any number.
int max_pool_forward(const PoolShape *shape, const float *x, float *y, int8_t *places) {
    const PoolShape s = *shape;
    const long row = (long)s.width * s.channels;
    for (int n = 0; n < s.samples; n++)
        for (int top = 0; top + s.window_height <= s.height; top += s.window_height)
            for (int left = 0; left + s.window_width <= s.width; left += s.window_width) {
                const float *window = x + ((long)n * s.height + top) * row + (long)left * s.channels;
                for (int c = 0; s.channels >= WIDTH && c < s.channels; c = next(c, s.channels)) {
                    Vec best = *reinterpret_cast<const LooseVec *>(window + c);
                    Ints place = {}, at = {};
                    for (int i = 0; i < s.window_height; i++)
                        for (int j = 0; j < s.window_width; j++, at += 1) {
                            const Vec value = *reinterpret_cast<const LooseVec *>(window + i * row + j * s.channels + c);
                            const Ints is_larger = (value > best) | (value != value);
                            best = is_larger ? value : best;
                            place = is_larger ? at : place;
                        }
                    *reinterpret_cast<LooseVec *>(y + c) = best;
                    *reinterpret_cast<LooseBytes *>(places + c) = __builtin_convertvector(place, Bytes);
                }
                for (int c = 0; s.channels < WIDTH && c < s.channels; c++) {
                    y[c] = window[c];
                    places[c] = 0;
                    for (int i = 0, at = 0; i < s.window_height; i++)
                        for (int j = 0; j < s.window_width; j++, at++) {
                            const float value = window[i * row + j * s.channels + c];
                            if (value > y[c] || value != value) y[c] = value, places[c] = at;
                        }
                }
                y += s.channels;
                places += s.channels;
            }
    return 0;
}

int max_pool_input_gradient(const PoolShape *shape, const float *dy, const int8_t *places, float *dx) {
    const PoolShape s = *shape;
    const long row = (long)s.width * s.channels;
    const int rows = s.height / s.window_height * s.window_height, columns = s.width / s.window_width * s.window_width;
    for (int n = 0; n < s.samples; n++) {
        float *image = dx + (long)n * s.height * row;
        for (int top = 0; top < rows; top += s.window_height)
            for (int left = 0; left < columns; left += s.window_width) {
                float *window = image + top * row + (long)left * s.channels;
                for (int c = 0; s.channels >= WIDTH && c < s.channels; c = next(c, s.channels)) {
                    const Ints place = __builtin_convertvector(*reinterpret_cast<const LooseBytes *>(places + c), Ints);
                    const Vec grad = *reinterpret_cast<const LooseVec *>(dy + c);
                    Ints at = {};
                    for (int i = 0; i < s.window_height; i++)
                        for (int j = 0; j < s.window_width; j++, at += 1)
                            *reinterpret_cast<LooseVec *>(window + i * row + j * s.channels + c) = place == at ? grad : Vec{};
                }
                for (int c = 0; s.channels < WIDTH && c < s.channels; c++)
                    for (int i = 0, at = 0; i < s.window_height; i++)
                        for (int j = 0; j < s.window_width; j++, at++)
                            window[i * row + j * s.channels + c] = places[c] == at ? dy[c] : 0.0f;
                dy += s.channels;
                places += s.channels;
            }
        for (int line = 0; line < rows; line++)
            memset(image + line * row + (long)columns * s.channels, 0, (size_t)(s.width - columns) * s.channels * 4);
        memset(image + rows * row, 0, (size_t)(s.height - rows) * row * 4);
    }
    return 0;
}

}  // extern "C"
