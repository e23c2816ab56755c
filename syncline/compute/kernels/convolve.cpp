// Convolutions of channels-last images in float32: forward, and the gradients of input, weight and bias.
//
// Each is a matrix product in which one factor, the patches of the input, is never materialized. In a channels-last
// image the part of a patch in one row of the image is one run of floats in memory (kernel width x channels).
// So a patch is `kernel height` runs, and a product with patches is a sum of products with runs:
//
//     forward        output[pixel][o]   = sum over rows r and places k of   run[pixel, r][k] * weight[r][k][o]
//     input gradient run[pixel, r][k]  += sum over o of                     grad[pixel][o]   * weight[r][o][k]
//     weight gradient weight[r][o][k]  += sum over pixels of                grad[pixel][o]   * run[pixel, r][k]
//
// The products themselves are in products.h.

#include "products.h"
#include "shape.h"
#include "threads.h"

namespace {

constexpr int PIXELS = 240;  // at once; a multiple of 4, 6 and 8

// Sizes in floats that all three passes need, and how samples are taken together.
struct Geometry {
    const Shape &s;
    int run, pixels_per_sample, group;
    long row, padded_sample, plain_row, plain_sample;
    bool pads;

    explicit Geometry(const Shape &shape) : s(shape) {
        run = s.kernel_width * s.channels;
        pixels_per_sample = s.output_height * s.output_width;
        group = most(1, least(s.samples, PIXELS / pixels_per_sample));
        row = (long)(s.width + 2 * s.column_padding) * s.channels;
        padded_sample = (long)(s.height + 2 * s.row_padding) * row;
        plain_row = (long)s.width * s.channels;
        plain_sample = (long)s.height * plain_row;
        pads = s.row_padding || s.column_padding;
    }
    long inside(int line) const { return (line + s.row_padding) * row + (long)s.column_padding * s.channels; }
    // Where the first run of this pixel of a group begins.
    long begin(int pixel) const {
        const int sample = pixel / pixels_per_sample, rest = pixel % pixels_per_sample;
        return sample * padded_sample + (long)(rest / s.output_width) * s.row_step * row
            + (long)(rest % s.output_width) * s.column_step * s.channels;
    }
    // The same for some pixels, without a division for each.
    void find(const float *samples, int first, int count, const float **rows) const {
        int column = first % s.output_width;
        const float *at = samples + begin(first);
        for (int p = 0; p < count; p++, column++, at += (long)s.column_step * s.channels) {
            if (column == s.output_width) column = 0, at = samples + begin(first + p);
            rows[p] = at;
        }
    }
    void pad(const float *samples, int count, float *to) const {
        for (int n = 0; n < count; n++)
            for (int line = 0; line < s.height; line++)
                memcpy(to + n * padded_sample + inside(line), samples + n * plain_sample + line * plain_row, plain_row * 4);
    }
    void unpad(const float *from, int count, float *samples) const {
        for (int n = 0; n < count; n++)
            for (int line = 0; line < s.height; line++)
                memcpy(samples + n * plain_sample + line * plain_row, from + n * padded_sample + inside(line), plain_row * 4);
    }
};

template <int VECS>
void add_outer_all(const float *columns, int outputs, const float *const *rows, long offset, int pixels, float *runs,
                   float *sums) {
    for (int p = 0; p < pixels; p++)
        for (int v = 0; v < VECS; v++)
            store(runs + (p * VECS + v) * WIDTH, load(rows[p] + offset + v * WIDTH));
    int o = 0;
    for (; o + COLUMNS <= outputs; o += COLUMNS)
        add_outer<COLUMNS, VECS>(columns + (size_t)o * pixels, pixels, runs, sums + o * VECS * WIDTH);
    for (; o < outputs; o++) add_outer<1, VECS>(columns + (size_t)o * pixels, pixels, runs, sums + o * VECS * WIDTH);
}

// The gradients of some pixels, four outputs next to each other and pixel after pixel, and their sum.
void take_columns(const float *grads, int outputs, int pixels, float *columns, float *sum) {
    const int fours = outputs / COLUMNS * COLUMNS;
    for (int p = 0; p < pixels; p++) {
        const float *grad = grads + (size_t)p * outputs;
        for (int o = 0; o < fours; o += COLUMNS) memcpy(columns + (size_t)o * pixels + p * COLUMNS, grad + o, COLUMNS * 4);
        for (int o = fours; o < outputs; o++) columns[(size_t)o * pixels + p] = grad[o];
        int o = 0;
        for (; o + WIDTH <= outputs; o += WIDTH) store(sum + o, load(sum + o) + load(grad + o));
        for (; o < outputs; o++) sum[o] += grad[o];
    }
}

// Runs shorter than two vectors, as in a first layer: vectorize over outputs instead.

constexpr int SHORT = 2 * WIDTH;  // in floats
constexpr int PLACES = 5;         // of a run at once
constexpr int GRADIENTS = 4096;   // at once, about

// sums[k][0 : 8 VECS] += sum over pixels of some lines of x[pixel][k] * grads[pixel][0 : 8 VECS].
template <int VECS>
ALONE void add_lines(const float *x, long by_line, long by_pixel, const float *grads, int outputs, int lines, int pixels,
                     float *sums, int wide) {
    Vec sum[PLACES][VECS];
    for (int k = 0; k < PLACES; k++)
        for (int v = 0; v < VECS; v++) sum[k][v] = load(sums + k * wide + v * WIDTH);
    for (int line = 0; line < lines; line++, x += by_line) {
        const float *place = x;
        for (int p = 0; p < pixels; p++, place += by_pixel, grads += outputs) {
            Vec operand[VECS];
            for (int v = 0; v < VECS; v++) {
                operand[v] = load(grads + v * WIDTH);
                KEEP_IN_REGISTER(operand[v]);
            }
            for (int k = 0; k < PLACES; k++)
                for (int v = 0; v < VECS; v++) sum[k][v] += place[k] * operand[v];
        }
    }
    for (int k = 0; k < PLACES; k++)
        for (int v = 0; v < VECS; v++) store(sums + k * wide + v * WIDTH, sum[k][v]);
}

void weight_gradient_of_short_runs(const Geometry &g, const float *x, const float *dy, float *dweight, float *dbias) {
    const Shape &s = g.s;
    const int wide = whole(s.outputs), places = (g.run + PLACES - 1) / PLACES * PLACES;
    const int at_once = most(1, GRADIENTS / (s.output_width * s.outputs));  // lines that stay in the cache
    const long sample = (long)g.pixels_per_sample * s.outputs;
    Floats sums((size_t)s.kernel_height * places * wide), image(g.padded_sample), last(sample);
    add_up(dy, (long)s.samples * g.pixels_per_sample, s.outputs, dbias);
    for (int n = 0; n < s.samples; n++) {
        const float *from = x + n * g.plain_sample, *grads = dy + n * sample;
        if (g.pads || n + 1 == s.samples) {  // the last positions may overrun the end of x
            g.pad(from, 1, image.at);
            from = image.at;
        }
        if (n + 1 == s.samples) grads = static_cast<float *>(memcpy(last.at, grads, sample * sizeof(float)));
        for (int line = 0; line < s.output_height; line += at_once)
            for (int r = 0; r < s.kernel_height; r++)
                for (int k = 0; k < places; k += PLACES)
                    for (int o = 0; o < wide; o += 2 * WIDTH) {
                        const auto add_these = o + 2 * WIDTH <= wide ? add_lines<2> : add_lines<1>;
                        add_these(from + (line * s.row_step + r) * g.row + k, s.row_step * g.row, (long)s.column_step * s.channels,
                                  grads + (long)line * s.output_width * s.outputs + o, s.outputs,
                                  least(at_once, s.output_height - line), s.output_width,
                                  sums.at + ((long)r * places + k) * wide + o, wide);
                    }
    }
    for (int o = 0; o < s.outputs; o++)
        for (int r = 0; r < s.kernel_height; r++)
            for (int k = 0; k < g.run; k++)
                dweight[((long)o * s.kernel_height + r) * g.run + k] = sums.at[((long)r * places + k) * wide + o];
}

void forward(const Shape &s, const float *x, const float *weight, const float *bias, float *y) {
    const Geometry g(s);
    const int depth = s.kernel_height * g.run, outputs = whole(s.outputs);
    Floats panels((size_t)depth * outputs), image(g.pads ? g.group * g.padded_sample : 1), sums((size_t)PIXELS * outputs);
    FOR_PANELS(begin, vecs, s.outputs) {
        float *panel = panels.at + (size_t)depth * begin;
        for (int o = begin; o < least(begin + vecs * WIDTH, s.outputs); o++)
            for (int k = 0; k < depth; k++) panel[(size_t)k * vecs * WIDTH + o - begin] = weight[(size_t)o * depth + k];
    }
    const float *rows[PIXELS];
    float *to[PIXELS];
    for (int p = 0; p < PIXELS; p++) to[p] = sums.at + (size_t)p * outputs;
    const int at_once = most(1, DEPTH / g.run);  // rows of a kernel that make up the depth of a panel
    for (int first = 0; first < s.samples; first += g.group) {
        const int count = least(g.group, s.samples - first), pixels = count * g.pixels_per_sample;
        const float *from = x + first * g.plain_sample;
        if (g.pads) {
            g.pad(from, count, image.at);
            from = image.at;
        }
        for (int begin_pixel = 0; begin_pixel < pixels; begin_pixel += PIXELS) {
            const int some = least(PIXELS, pixels - begin_pixel);
            g.find(from, begin_pixel, some, rows);
            for (int r = 0; r < s.kernel_height; r += at_once)
                for (int k = 0; k < g.run; k += DEPTH) {
                    const int parts = least(at_once, s.kernel_height - r), length = least(DEPTH, g.run - k);
                    FOR_PANELS(begin, vecs, s.outputs) {
                        const float *panel = panels.at + (size_t)depth * begin + (size_t)(r * g.run + k) * vecs * WIDTH;
                        multiply_panel(vecs, rows, some, r * g.row + k, parts, g.row, length, panel, to, begin, r || k, false);
                    }
                }
            float *out = y + ((size_t)first * g.pixels_per_sample + begin_pixel) * s.outputs;
            for (int p = 0; p < some; p++, out += s.outputs) {
                if (s.outputs < WIDTH) {
                    for (int o = 0; o < s.outputs; o++) out[o] = bias ? to[p][o] + bias[o] : to[p][o];
                    continue;
                }
                // The last vector overlaps the one before instead of being shorter.
                for (int o = 0; o < s.outputs; o = next_vector(o, s.outputs))
                    store(out + o, bias ? load(to[p] + o) + load(bias + o) : load(to[p] + o));
            }
        }
    }
}

void input_gradient(const Shape &s, const float *dy, const float *weight, float *dx) {
    const Geometry g(s);
    const int run = whole(g.run);
    Floats panels((size_t)s.kernel_height * s.outputs * run), image(g.group * g.padded_sample);
    for (int r = 0; r < s.kernel_height; r++)
        FOR_PANELS(begin, vecs, g.run) {
            float *panel = panels.at + (size_t)r * s.outputs * run + (size_t)s.outputs * begin;
            for (int o = 0; o < s.outputs; o++)
                memcpy(panel + (size_t)o * vecs * WIDTH, weight + ((size_t)o * s.kernel_height + r) * g.run + begin,
                       least(vecs * WIDTH, g.run - begin) * 4);
        }
    const float *rows[PIXELS];
    float *to[PIXELS];
    for (int first = 0; first < s.samples; first += g.group) {
        const int count = least(g.group, s.samples - first), lines = count * s.output_height;
        memset(image.at, 0, (g.group * g.padded_sample + WIDTH) * 4);
        // Neighbors in a line write to the same addresses and would stall each other: iterate over columns instead.
        const int at_once = most(1, PIXELS / s.output_width), wide = least(s.output_width, PIXELS);
        for (int line = 0; line < lines; line += at_once)
            for (int left = 0; left < s.output_width; left += wide) {
                int some = 0;
                for (int column = left; column < least(left + wide, s.output_width); column++)
                    for (int l = line; l < least(line + at_once, lines); l++, some++) {
                        const int pixel = l * s.output_width + column;
                        rows[some] = dy + ((size_t)first * g.pixels_per_sample + pixel) * s.outputs;
                        to[some] = image.at + g.begin(pixel);
                    }
                for (int r = 0; r < s.kernel_height; r++)
                    for (int o = 0; o < s.outputs; o += DEPTH)
                        FOR_PANELS(begin, vecs, g.run) {
                            const float *panel = panels.at + (size_t)r * s.outputs * run + (size_t)s.outputs * begin
                                + (size_t)o * vecs * WIDTH;
                            multiply_panel(vecs, rows, some, o, 1, 0, least(DEPTH, s.outputs - o), panel, to,
                                           r * g.row + begin, false, true);
                        }
            }
        g.unpad(image.at, count, dx + first * g.plain_sample);
    }
}

void weight_gradient(const Shape &s, const float *x, const float *dy, float *dweight, float *dbias) {
    const Geometry g(s);
    if (g.run < SHORT) return weight_gradient_of_short_runs(g, x, dy, dweight, dbias);
    const int run = whole(g.run);
    Floats sums((size_t)s.kernel_height * s.outputs * run), columns((size_t)PIXELS * s.outputs), runs(PIXELS * WIDEST * WIDTH);
    Floats image(g.group * g.padded_sample);
    memset(dbias, 0, s.outputs * sizeof(float));
    const float *rows[PIXELS];
    for (int first = 0; first < s.samples; first += g.group) {
        const int count = least(g.group, s.samples - first), pixels = count * g.pixels_per_sample;
        const float *from = x + first * g.plain_sample;
        if (g.pads || first + count == s.samples) {  // the last run's last vector may overrun the end of x
            g.pad(from, count, image.at);
            from = image.at;
        }
        for (int begin_pixel = 0; begin_pixel < pixels; begin_pixel += PIXELS) {
            const int some = least(PIXELS, pixels - begin_pixel);
            g.find(from, begin_pixel, some, rows);
            take_columns(dy + ((size_t)first * g.pixels_per_sample + begin_pixel) * s.outputs, s.outputs, some, columns.at, dbias);
            for (int r = 0; r < s.kernel_height; r++)
                FOR_PANELS(begin, vecs, g.run) {
                    const auto add_these = vecs == 3 ? add_outer_all<3> : vecs == 2 ? add_outer_all<2> : add_outer_all<1>;
                    float *sum = sums.at + (size_t)r * s.outputs * run + (size_t)s.outputs * begin;
                    add_these(columns.at, s.outputs, rows, r * g.row + begin, some, runs.at, sum);
                }
        }
    }
    for (int r = 0; r < s.kernel_height; r++)
        FOR_PANELS(begin, vecs, g.run) {
            const float *sum = sums.at + (size_t)r * s.outputs * run + (size_t)s.outputs * begin;
            for (int o = 0; o < s.outputs; o++)
                memcpy(dweight + ((size_t)o * s.kernel_height + r) * g.run + begin, sum + (size_t)o * vecs * WIDTH,
                       least(vecs * WIDTH, g.run - begin) * 4);
        }
}

}  // namespace

extern "C" {

// Weights are laid out (output, row, column, channel); bias may be null.
int convolve_forward(const Shape *s, const float *x, const float *weight, const float *bias, float *y) {
    return forward_in_parts(*s, x, weight, bias, y, forward);
}

int convolve_input_gradient(const Shape *s, const float *dy, const float *weight, float *dx) {
    return input_gradient_in_parts(*s, dy, weight, dx, input_gradient);
}

int convolve_weight_gradient(const Shape *s, const float *x, const float *dy, float *dweight, float *dbias) {
    return weight_gradient_in_parts(*s, x, dy, dweight, dbias, weight_gradient);
}

}  // extern "C"
