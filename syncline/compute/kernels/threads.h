// Several threads for one convolution: each computes some of the samples.
//
// The threads are OpenMP's, which torch uses as well: the loader reuses the OpenMP library that is already loaded, so
// both share one thread pool and cores are not oversubscribed. Without OpenMP, one thread does everything.

#pragma once

#include "products.h"
#include "shape.h"

namespace {

// `compute(part, first, number)` is called for each part of the samples; the first one in it is number `first`.
template <class Compute>
inline int in_parts(const Shape &s, const Compute &compute) {
    const int parts = most(1, least(s.threads, s.samples));
    if (parts == 1) return status_of([&] { compute(s, 0L, 0); });
    int lacks_memory = 0;
#pragma omp parallel for num_threads(parts) schedule(static, 1) reduction(| : lacks_memory)
    for (int i = 0; i < parts; i++) {
        const long first = (long)s.samples * i / parts, end = (long)s.samples * (i + 1) / parts;
        Shape part = s;
        part.samples = end - first;
        lacks_memory |= status_of([&] { compute(part, first, i); });
    }
    return lacks_memory;
}

inline long input_floats(const Shape &s) { return (long)s.height * s.width * s.channels; }
inline long output_floats(const Shape &s) { return (long)s.output_height * s.output_width * s.outputs; }
inline long weight_floats(const Shape &s) { return (long)s.outputs * s.kernel_height * s.kernel_width * s.channels; }

// The three passes in parts, from functions that compute them for some samples.

template <class Forward>
inline int forward_in_parts(const Shape &s, const float *x, const float *weight, const float *bias, float *y,
                            const Forward &forward) {
    return in_parts(s, [&](const Shape &part, long first, int) {
        forward(part, x + first * input_floats(s), weight, bias, y + first * output_floats(s));
    });
}

template <class Gradient>
inline int input_gradient_in_parts(const Shape &s, const float *dy, const float *weight, float *dx, const Gradient &gradient) {
    return in_parts(s, [&](const Shape &part, long first, int) {
        gradient(part, dy + first * output_floats(s), weight, dx + first * input_floats(s));
    });
}

// Each part has its own sums, which are added at the end: bit-identical for the same number of threads.
template <class Gradient>
inline int weight_gradient_in_parts(const Shape &s, const float *x, const float *dy, float *dweight, float *dbias,
                                    const Gradient &gradient) {
    const int others = most(1, least(s.threads, s.samples)) - 1;
    const long weights = weight_floats(s), size = weights + s.outputs;
    int lacks_memory = 0;
    lacks_memory |= status_of([&] {
        Array<float> sums(others * size);
        lacks_memory |= in_parts(s, [&](const Shape &part, long first, int number) {
            float *mine = number ? sums.at + (number - 1) * size : nullptr;
            gradient(part, x + first * input_floats(s), dy + first * output_floats(s), mine ? mine : dweight,
                     mine ? mine + weights : dbias);
        });
        for (int i = 0; i < others; i++) {
            const float *theirs = sums.at + i * size;
            for (long k = 0; k < weights; k++) dweight[k] += theirs[k];
            for (int o = 0; o < s.outputs; o++) dbias[o] += theirs[weights + o];
        }
    });
    return lacks_memory;
}

}  // namespace
