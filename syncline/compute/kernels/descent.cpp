// Coordinate descent for least squares with an L1 and an L2 penalty.

#include <cmath>

namespace {

constexpr int LANES = 16;  // independent sums, so that the compiler may use vectors without reordering a sum

double product(const double *a, const double *b, long count) {
    double sums[LANES] = {};
    long i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int k = 0; k < LANES; k++) sums[k] += a[i + k] * b[i + k];
    double total = 0;
    for (; i < count; i++) total += a[i] * b[i];
    for (int k = 0; k < LANES; k++) total += sums[k];
    return total;
}

}  // namespace

// Goes over `columns` of x (by columns) up to `passes` times, while the largest change is more than `left` of that of
// the first pass. `weights` and `change` have an entry for each of the columns; `change` is that of the last pass.
extern "C" void descend(const double *x, long rows, const long *columns, long count, int passes, double left,
                        double *rest, double *weights, const double *squares, double l1, double l2, double *change) {
    double first = 0;
    for (int pass = 0; pass < passes; pass++) {
        double largest = 0;
        for (long i = 0; i < count; i++) {
            const double *column = x + columns[i] * rows;
            const double square = squares[columns[i]];
            change[i] = 0;
            if (square <= 0) continue;
            const double ahead = product(column, rest, rows) + square * weights[i];
            const double size = std::fabs(ahead) - l1;
            const double fresh = size > 0 ? std::copysign(size, ahead) / (square + l2) : 0.0;
            const double step = fresh - weights[i];
            if (step == 0) continue;
            weights[i] = fresh;
#pragma GCC ivdep  // they do not overlap
            for (long row = 0; row < rows; row++) rest[row] -= step * column[row];
            change[i] = std::fabs(step) * std::sqrt(square);
            if (change[i] > largest) largest = change[i];
        }
        if (pass == 0) first = largest;
        if (largest <= left * first) break;
    }
}
