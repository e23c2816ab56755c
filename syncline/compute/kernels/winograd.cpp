// Convolutions of channels-last images in float32 with kernels of 3 x 3 or 5 x 5 and steps of one, with fewer
// multiplications: Winograd's algorithm (Lavin & Gray 2016), for all three passes.
//
// The output is cut into tiles of 4 x 4, each of which depends on 6 x 6 pixels of the input, or on 8 x 8 for the larger
// kernel. Pixels, weights and outputs are treated as polynomials, and a convolution is their product. It is computed
// from their values at as many points as a tile has pixels in one direction: 0, 1, -1, 2, -2 and infinity, and
// 1/2 and -1/2 if there are eight. For each pair of points, one for each direction,
//
//     forward          output[tile][o]  = sum over channels c of   pixels[tile][c] * weight[c][o]
//     input gradient   pixels[tile][c]  = sum over outputs o of    output[tile][o] * weight[o][c]
//     weight gradient  weight[o][c]     = sum over tiles of        output[tile][o] * pixels[tile][c]
//
// which is 36 multiplications for 16 outputs instead of 144, or 64 instead of 400. Gradients use the transposes of the
// transformations below. Errors are about 10 times those of plain sums, some 1e-5 of the largest value. The products
// themselves are in products.h.

#include "products.h"
#include "shape.h"
#include "threads.h"

namespace {

constexpr int STEP = 4;             // from one tile to the next: pixels of the output that a tile gives, in one direction
constexpr int GAP = 16;             // floats between one point's numbers and the next one's: other sets of the cache
constexpr int LEAST_TILES = 36;     // at once
constexpr size_t AT_ONCE = 1 << 18; // floats of tiles that are worked on at once, if that is enough for so many tiles
constexpr int SOME = 16;            // channels whose weights are laid out at once: a line of the cache
constexpr int CHUNK = 64;           // outputs whose weight gradients are summed up at once

// Transformations in one direction, of numbers `apart` floats apart, and their transposes. SIDE: number of points.
// Points come in pairs such as 1 and -1, for which even and odd powers are summed once.

template <int SIDE>
struct PixelsToPoints {
    static constexpr int IN = SIDE, OUT = SIDE;
    static inline void apply(const Vec *d, int apart, Vec *to, int to_apart) {
        const Vec d0 = d[0], d1 = d[apart], d2 = d[2 * apart], d3 = d[3 * apart], d4 = d[4 * apart], d5 = d[5 * apart];
        Vec even, odd, even2, odd2;
        if constexpr (SIDE == 6) {
            even = d4 - 4 * d2, odd = d3 - 4 * d1, even2 = d4 - d2, odd2 = 2 * (d3 - d1);
            to[0] = 4 * d0 - 5 * d2 + d4;
            to[5 * to_apart] = 4 * d1 - 5 * d3 + d5;
        } else {
            const Vec d6 = d[6 * apart], d7 = d[7 * apart];
            even = d2 - 4.25f * d4 + d6, odd = d1 - 4.25f * d3 + d5;
            even2 = 0.25f * d2 - 1.25f * d4 + d6, odd2 = 0.5f * d1 - 2.5f * d3 + 2 * d5;
            const Vec even_half = 4 * d2 - 5 * d4 + d6, odd_half = 2 * d1 - 2.5f * d3 + 0.5f * d5;
            to[0] = d0 + 5.25f * (d4 - d2) - d6;
            to[5 * to_apart] = even_half + odd_half;
            to[6 * to_apart] = even_half - odd_half;
            to[7 * to_apart] = d7 + 5.25f * (d3 - d5) - d1;
        }
        to[to_apart] = even + odd;
        to[2 * to_apart] = even - odd;
        to[3 * to_apart] = even2 + odd2;
        to[4 * to_apart] = even2 - odd2;
    }
};

template <int SIDE>
struct PointsToPixels {
    static constexpr int IN = SIDE, OUT = SIDE;
    static inline void apply(const Vec *p, int apart, Vec *to, int to_apart) {
        const Vec p0 = p[0], p1 = p[apart], p2 = p[2 * apart], p3 = p[3 * apart], p4 = p[4 * apart], p5 = p[5 * apart];
        const Vec even = p1 + p2, odd = p1 - p2, even2 = p3 + p4, odd2 = p3 - p4;
        if constexpr (SIDE == 6) {
            to[0] = 4 * p0;
            to[to_apart] = 4 * (p5 - odd) - 2 * odd2;
            to[2 * to_apart] = -5 * p0 - 4 * even - even2;
            to[3 * to_apart] = odd + 2 * odd2 - 5 * p5;
            to[4 * to_apart] = p0 + even + even2;
            to[5 * to_apart] = p5;
        } else {
            const Vec p6 = p[6 * apart], p7 = p[7 * apart], even_half = p5 + p6, odd_half = p5 - p6;
            to[0] = p0;
            to[to_apart] = odd + 0.5f * odd2 + 2 * odd_half - p7;
            to[2 * to_apart] = even + 0.25f * even2 + 4 * even_half - 5.25f * p0;
            to[3 * to_apart] = 5.25f * p7 - 4.25f * odd - 2.5f * (odd2 + odd_half);
            to[4 * to_apart] = 5.25f * p0 - 4.25f * even - 1.25f * even2 - 5 * even_half;
            to[5 * to_apart] = odd + 2 * odd2 + 0.5f * odd_half - 5.25f * p7;
            to[6 * to_apart] = even + even2 + even_half - p0;
            to[7 * to_apart] = p7;
        }
    }
};

// Values of a polynomial with N coefficients, 3 to 5 of them.
template <int SIDE, int N>
struct ToPoints {
    static constexpr int IN = N, OUT = SIDE;
    static inline void apply(const Vec *x, int apart, Vec *to, int to_apart) {
        const Vec x0 = x[0], x1 = x[apart], x2 = x[2 * apart];
        Vec even = x0 + x2, odd = x1, even2 = x0 + 4 * x2, odd2 = 2 * x1, even_half = x0 + 0.25f * x2, odd_half = 0.5f * x1;
        if constexpr (N > 3) odd += x[3 * apart], odd2 += 8 * x[3 * apart], odd_half += 0.125f * x[3 * apart];
        if constexpr (N > 4) even += x[4 * apart], even2 += 16 * x[4 * apart], even_half += 0.0625f * x[4 * apart];
        to[0] = x0;
        to[to_apart] = even + odd;
        to[2 * to_apart] = even - odd;
        to[3 * to_apart] = even2 + odd2;
        to[4 * to_apart] = even2 - odd2;
        if constexpr (SIDE == 8) {
            to[5 * to_apart] = even_half + odd_half;
            to[6 * to_apart] = even_half - odd_half;
        }
        to[(SIDE - 1) * to_apart] = x[(N - 1) * apart];
    }
};

template <int SIDE, int N>
struct FromPoints {
    static constexpr int IN = SIDE, OUT = N;
    static inline void apply(const Vec *p, int apart, Vec *to, int to_apart) {
        const Vec p1 = p[apart], p2 = p[2 * apart], p3 = p[3 * apart], p4 = p[4 * apart], infinite = p[(SIDE - 1) * apart];
        const Vec even = p1 + p2, odd = p1 - p2, even2 = p3 + p4, odd2 = p3 - p4;
        Vec even_half = {}, odd_half = {};
        if constexpr (SIDE == 8) even_half = p[5 * apart] + p[6 * apart], odd_half = p[5 * apart] - p[6 * apart];
        Vec x[5] = {
            p[0] + even + even2 + even_half,
            odd + 2 * odd2 + 0.5f * odd_half,
            even + 4 * even2 + 0.25f * even_half,
            odd + 8 * odd2 + 0.125f * odd_half,
            even + 16 * even2 + 0.0625f * even_half,
        };
        x[N - 1] += infinite;
        for (int i = 0; i < N; i++) to[i * to_apart] = x[i];
    }
};

// The factors for the weights' values at each point that make the result the convolution.
template <int SIDE>
float factor(int point) {
    constexpr float OF_SIX[] = {1.0f / 4, -1.0f / 6, -1.0f / 6, 1.0f / 24, 1.0f / 24, 1.0f};
    constexpr float OF_EIGHT[] = {1.0f, -2.0f / 9, -2.0f / 9, 1.0f / 90, 1.0f / 90, 32.0f / 45, 32.0f / 45, 1.0f};
    const float *factors = SIDE == 6 ? OF_SIX : OF_EIGHT;
    return factors[point / SIDE] * factors[point % SIDE];
}

// In both directions: IN x IN numbers become OUT x OUT.
template <class T>
inline void transform(const Vec *from, Vec *to) {
    Vec between[T::OUT * T::IN];
    for (int i = 0; i < T::IN; i++) T::apply(from + i, T::IN, between + i, T::IN);
    for (int i = 0; i < T::OUT; i++) T::apply(between + i * T::IN, 1, to + i * T::OUT, 1);
}

// Floats that may be fewer than a vector: sizes that the compiler knows are copied without a call.
inline void store_some(float *at, Vec v, int count) {
    if (count >= WIDTH) return store(at, v);
    const float *from = reinterpret_cast<const float *>(&v);
    for (int size = WIDTH / 2; size > 0; size /= 2)
        if (count & size) {
            memcpy(at, from, size * sizeof(float));
            at += size, from += size;
        }
}
inline Vec load_some(const float *at, int count) {
    if (count >= WIDTH) return load(at);
    Vec v = {};
    float *to = reinterpret_cast<float *>(&v);
    for (int size = WIDTH / 2; size > 0; size /= 2)
        if (count & size) {
            memcpy(to, at, size * sizeof(float));
            at += size, to += size;
        }
    return v;
}

// An image per sample, and its tiles: `side` pixels each, `step` apart, beginning `before` the image.
struct Tiled {
    int height, width, channels, side, step, rows_before, columns_before;

    // Where the pixels of a tile are; null outside of the image.
    void find(float *images, int sample, int row, int column, float **at) const {
        const int top = row * step - rows_before, left = column * step - columns_before;
        for (int i = 0; i < side; i++)
            for (int j = 0; j < side; j++) {
                const int y = top + i, x = left + j;
                const bool is_inside = y >= 0 && y < height && x >= 0 && x < width;
                at[i * side + j] = is_inside ? images + (((long)sample * height + y) * width + x) * channels : nullptr;
            }
    }
};

// Sizes that all passes need, and which tiles there are.
template <int KERNEL>
struct Plan {
    static constexpr int SIDE = STEP + KERNEL - 1, POINTS = SIDE * SIDE;
    const Shape &s;
    Tiled inputs, outputs;
    int tile_rows, tile_columns, tiles;

    explicit Plan(const Shape &shape)
        : s(shape),
          inputs{s.height, s.width, s.channels, SIDE, STEP, s.row_padding, s.column_padding},
          outputs{s.output_height, s.output_width, s.outputs, STEP, STEP, 0, 0} {
        tile_rows = (s.output_height + STEP - 1) / STEP;
        tile_columns = (s.output_width + STEP - 1) / STEP;
        tiles = s.samples * tile_rows * tile_columns;
    }
    void find(const Tiled &tiled, float *images, int tile, float **at) const {
        const int per_sample = tile_rows * tile_columns, rest = tile % per_sample;
        tiled.find(images, tile / per_sample, rest / tile_columns, rest % tile_columns, at);
    }
    // How many tiles are worked on at once, if one has so many floats at each point: all of them, if they are less than
    // the weights, which then are needed only once; otherwise as many as stay in the cache, in parts of about one size.
    int at_once(int floats) const {
        if ((long)tiles * floats < (long)s.channels * s.outputs) return tiles;
        const int most_tiles = most(LEAST_TILES, least(tiles, AT_ONCE / ((size_t)POINTS * floats)));
        const int parts = (tiles + most_tiles - 1) / most_tiles;
        return ((tiles + parts - 1) / parts + 11) / 12 * 12;  // which suits panels of each size
    }
};

// The values of some tiles at all points; `keep(tile, channel, values)` takes them, a vector of channels at a time.
template <class T, int KERNEL, class Keep>
void take(const Plan<KERNEL> &plan, const Tiled &tiled, const float *images, int first, int count, const Keep &keep) {
    constexpr int PIXELS = T::IN * T::IN, POINTS = T::OUT * T::OUT;
    const int wide = whole(tiled.channels);
    const float *end = images + (long)plan.s.samples * tiled.height * tiled.width * tiled.channels;
    Floats zeros(wide), spare((size_t)PIXELS * wide, false);
    for (int t = 0; t < count; t++) {
        float *at[PIXELS];
        plan.find(tiled, const_cast<float *>(images), first + t, at);
        for (int i = 0; i < PIXELS; i++) {
            if (!at[i]) at[i] = zeros.at;
            else if (at[i] + wide > end) {  // the last vector would overrun the end
                float *copy = spare.at + (size_t)i * wide;
                memset(copy, 0, wide * sizeof(float));
                at[i] = static_cast<float *>(memcpy(copy, at[i], tiled.channels * sizeof(float)));
            }
        }
        for (int c = 0; c < wide; c += WIDTH) {
            Vec pixels[PIXELS], values[POINTS];
            for (int i = 0; i < PIXELS; i++) pixels[i] = load(at[i] + c);
            transform<T>(pixels, values);
            keep(t, c, values);
        }
    }
}

// Weights are laid out (output, row, column, channel). Those of some `columns`, outputs or channels, at all points, for
// each of the others, the `depth`: panel[point][depth][column].
template <int KERNEL>
void take_weights(const Shape &s, const float *weight, bool columns_are_outputs, int begin, int vecs, float *panel, long by_point) {
    constexpr int PLACES = KERNEL * KERNEL, SIDE = Plan<KERNEL>::SIDE, POINTS = SIDE * SIDE;
    const int wide = vecs * WIDTH, depth = columns_are_outputs ? s.channels : s.outputs;
    const int columns = least(wide, (columns_are_outputs ? s.outputs : s.channels) - begin);
    float some[SOME * PLACES * WIDEST * WIDTH] __attribute__((aligned(32))) = {};  // [depth][place][column]
    Vec factors[POINTS];
    for (int i = 0; i < POINTS; i++) factors[i] = Vec{} + factor<SIDE>(i);
    for (int first = 0; first < depth; first += SOME) {
        const int count = least(SOME, depth - first);
        if (columns_are_outputs) {
            for (int o = 0; o < columns; o++)
                for (int place = 0; place < PLACES; place++) {
                    const float *from = weight + ((long)(begin + o) * PLACES + place) * s.channels + first;
                    for (int k = 0; k < count; k++) some[(k * PLACES + place) * wide + o] = from[k];
                }
        } else {
            for (int k = 0; k < count; k++)
                for (int place = 0; place < PLACES; place++)
                    memcpy(some + (k * PLACES + place) * wide, weight + ((long)(first + k) * PLACES + place) * s.channels + begin,
                           columns * sizeof(float));
        }
        for (int k = 0; k < count; k++)
            for (int v = 0; v < vecs; v++) {
                Vec places[PLACES], values[POINTS];
                for (int i = 0; i < PLACES; i++) places[i] = load(some + (k * PLACES + i) * wide + v * WIDTH);
                transform<ToPoints<SIDE, KERNEL>>(places, values);
                for (int i = 0; i < POINTS; i++)
                    store(panel + i * by_point + (long)(first + k) * wide + v * WIDTH, values[i] * factors[i]);
            }
    }
}

// Output and input gradient: tiles of one image times weights give tiles of the other.
// `put(pixel, channel, vector, count)` receives the results inside that image.
template <class Take, class Give, int KERNEL, class Put>
void multiply_tiles(const Plan<KERNEL> &plan, const Tiled &from, const float *images, const float *weight, const Tiled &to,
                    float *results, bool columns_are_outputs, const Put &put) {
    constexpr int POINTS = Plan<KERNEL>::POINTS;
    const int depth = from.channels, deep = whole(depth), wide = WIDEST * WIDTH, count = plan.at_once(deep + wide);
    const long by_point = (long)count * deep + GAP, sums_by_point = (long)count * wide + GAP;
    const long panel_by_point = (long)depth * wide + GAP, panel_size = POINTS * panel_by_point;
    const bool is_one_part = count >= plan.tiles;
    int panels = 0;
    FOR_PANELS(begin, vecs, to.channels) panels++;
    Floats values(POINTS * by_point, false), sums(POINTS * sums_by_point, false);
    Floats weights(panel_size * (is_one_part ? 1 : panels), false);
    Array<const float *> rows(count);
    Array<float *> tos(count);
    for (int t = 0; t < count; t++) rows.at[t] = values.at + (long)t * deep, tos.at[t] = sums.at + (long)t * wide;
    for (int first = 0; first < plan.tiles; first += count) {
        const int some = least(count, plan.tiles - first);
        take<Take>(plan, from, images, first, some, [&](int t, int c, const Vec *at_points) {
            for (int i = 0; i < POINTS; i++) store(values.at + i * by_point + (long)t * deep + c, at_points[i]);
        });
        int number = 0;
        FOR_PANELS(begin, vecs, to.channels) {
            float *panel = weights.at + (is_one_part ? 0 : number++) * panel_size;
            if (first == 0) take_weights<KERNEL>(plan.s, weight, columns_are_outputs, begin, vecs, panel, panel_by_point);
            for (int i = 0; i < POINTS; i++)
                for (int k = 0; k < depth; k += DEPTH)
                    multiply_panel(vecs, rows.at, some, i * by_point + k, 1, 0, least(DEPTH, depth - k),
                                   panel + i * panel_by_point + (long)k * vecs * WIDTH, tos.at, i * sums_by_point, k > 0, false);
            for (int t = 0; t < some; t++) {
                constexpr int PIXELS = Give::OUT * Give::OUT;
                float *at[PIXELS];
                plan.find(to, results, first + t, at);
                for (int v = 0; v < vecs; v++) {
                    Vec at_points[POINTS], pixels[PIXELS];
                    for (int i = 0; i < POINTS; i++) at_points[i] = load(tos.at[t] + i * sums_by_point + v * WIDTH);
                    transform<Give>(at_points, pixels);
                    const int c = begin + v * WIDTH;
                    for (int i = 0; i < PIXELS; i++)
                        if (at[i]) put(at[i] + c, c, pixels[i], to.channels - c);
                }
            }
        }
    }
}

template <int KERNEL>
void forward(const Shape &s, const float *x, const float *weight, const float *bias, float *y) {
    const Plan<KERNEL> plan(s);
    Floats biases(whole(s.outputs));
    if (bias) memcpy(biases.at, bias, s.outputs * sizeof(float));
    multiply_tiles<PixelsToPoints<plan.SIDE>, FromPoints<plan.SIDE, STEP>>(
        plan, plan.inputs, x, weight, plan.outputs, y, true,
        [&](float *at, int o, Vec pixel, int count) { store_some(at, pixel + load(biases.at + o), count); });
}

template <int KERNEL>
void input_gradient(const Shape &s, const float *dy, const float *weight, float *dx) {
    const Plan<KERNEL> plan(s);
    memset(dx, 0, (size_t)s.samples * s.height * s.width * s.channels * sizeof(float));
    multiply_tiles<ToPoints<plan.SIDE, STEP>, PointsToPixels<plan.SIDE>>(
        plan, plan.outputs, dy, weight, plan.inputs, dx, false,
        [&](float *at, int, Vec pixel, int count) { store_some(at, load_some(at, count) + pixel, count); });
}

template <int VECS>
void add_outer_all(const float *columns, int outputs, int tiles, const float *runs, float *sums) {
    for (int o = 0; o < outputs; o += COLUMNS)
        add_outer<COLUMNS, VECS>(columns + (long)o * tiles, tiles, runs, sums + (long)o * VECS * WIDTH);
}

template <int KERNEL>
void weight_gradient(const Shape &s, const float *x, const float *dy, float *dweight, float *dbias) {
    constexpr int PLACES = KERNEL * KERNEL, SIDE = Plan<KERNEL>::SIDE, POINTS = SIDE * SIDE;
    const Plan<KERNEL> plan(s);
    add_up(dy, (long)s.samples * s.output_height * s.output_width, s.outputs, dbias);
    const int channels = whole(s.channels), outputs = whole(s.outputs), count = plan.at_once(channels + outputs);
    const long by_point = (long)count * channels + GAP, columns_by_point = (long)count * outputs + GAP;
    const bool is_one_part = count >= plan.tiles;
    Floats values(POINTS * by_point, false), columns(POINTS * columns_by_point, false);
    // For each panel of channels and chunk of outputs: [point][output][channel].
    Floats sums((size_t)POINTS * (is_one_part ? CHUNK * WIDEST * WIDTH : outputs * channels));
    Vec factors[POINTS];
    for (int i = 0; i < POINTS; i++) factors[i] = Vec{} + factor<SIDE>(i);
    for (int first = 0; first < plan.tiles; first += count) {
        const int some = least(count, plan.tiles - first);
        take<PixelsToPoints<SIDE>>(plan, plan.inputs, x, first, some, [&](int t, int c, const Vec *at_points) {
            int begin = 0, vecs = panel_of(channels / WIDTH);  // of the panel that this belongs to
            while (begin + vecs * WIDTH <= c) begin += vecs * WIDTH, vecs = panel_of((channels - begin) / WIDTH);
            float *to = values.at + (long)begin * some + (long)t * vecs * WIDTH + c - begin;
            for (int i = 0; i < POINTS; i++) store(to + i * by_point, at_points[i]);
        });
        take<ToPoints<SIDE, STEP>>(plan, plan.outputs, dy, first, some, [&](int t, int o, const Vec *at_points) {
            float *to = columns.at + (long)o * some + t * COLUMNS;
            for (int i = 0; i < POINTS; i++) {
                memcpy(to + i * columns_by_point, &at_points[i], COLUMNS * sizeof(float));
                memcpy(to + i * columns_by_point + COLUMNS * some, (const float *)&at_points[i] + COLUMNS, COLUMNS * sizeof(float));
            }
        });
        float *sum = sums.at;
        FOR_PANELS(begin, vecs, s.channels) {
            const int wide = vecs * WIDTH;
            for (int o = 0; o < outputs; o += CHUNK) {
                const int these = least(CHUNK, outputs - o);
                const long sums_by_point = (long)these * wide;
                if (is_one_part) memset(sum, 0, POINTS * sums_by_point * sizeof(float));
                for (int i = 0; i < POINTS; i++) {
                    const auto add_these = vecs == 3 ? add_outer_all<3> : vecs == 2 ? add_outer_all<2> : add_outer_all<1>;
                    add_these(columns.at + i * columns_by_point + (long)o * some, these, some,
                              values.at + i * by_point + (long)begin * some, sum + i * sums_by_point);
                }
                for (int k = 0; first + some == plan.tiles && k < least(these, s.outputs - o); k++)
                    for (int v = 0; v < vecs; v++) {
                        Vec at_points[POINTS], places[PLACES];
                        for (int i = 0; i < POINTS; i++)
                            at_points[i] = load(sum + i * sums_by_point + (long)k * wide + v * WIDTH) * factors[i];
                        transform<FromPoints<SIDE, KERNEL>>(at_points, places);
                        const int c = begin + v * WIDTH;
                        for (int i = 0; i < PLACES; i++)
                            store_some(dweight + ((long)(o + k) * PLACES + i) * s.channels + c, places[i], s.channels - c);
                    }
                if (!is_one_part) sum += POINTS * sums_by_point;
            }
        }
    }
}

}  // namespace

extern "C" {

// Weights are laid out (output, row, column, channel); bias may be null.
int winograd_forward(const Shape *s, const float *x, const float *weight, const float *bias, float *y) {
    return forward_in_parts(*s, x, weight, bias, y, s->kernel_height == 3 ? forward<3> : forward<5>);
}

int winograd_input_gradient(const Shape *s, const float *dy, const float *weight, float *dx) {
    return input_gradient_in_parts(*s, dy, weight, dx, s->kernel_height == 3 ? input_gradient<3> : input_gradient<5>);
}

int winograd_weight_gradient(const Shape *s, const float *x, const float *dy, float *dweight, float *dbias) {
    return weight_gradient_in_parts(*s, x, dy, dweight, dbias, s->kernel_height == 3 ? weight_gradient<3> : weight_gradient<5>);
}

}  // extern "C"
