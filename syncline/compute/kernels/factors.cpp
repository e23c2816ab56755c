// Least squares for rows of a factor matrix, one after the other: (base + ridge I + sum w v v') x = sum t v.

#include <cmath>
#include <cstdlib>

// `offsets` has the entries of each of the `count` rows: the rows of `other` that they refer to, with a weight and a
// target each. `base` is a symmetric matrix that all rows share. Returns 0, 1 without memory, 2 if a matrix is singular.
extern "C" int solve_rows(const double *base, const double *other, long factors, const long *offsets,
                          const long *entries, const double *weights, const double *targets, const double *ridges,
                          long count, double *found) {
    const long n = factors;
    double *a = static_cast<double *>(std::malloc(sizeof(double) * n * n));
    if (a == nullptr) return 1;
    int failed = 0;
    for (long row = 0; row < count && !failed; row++) {
        double *x = found + row * n;
        for (long i = 0; i < n * n; i++) a[i] = base[i];
        for (long i = 0; i < n; i++) a[i * n + i] += ridges[row], x[i] = 0;
        for (long e = offsets[row]; e < offsets[row + 1]; e++) {
            const double *v = other + entries[e] * n;
            const double weight = weights[e], target = targets[e];
            for (long i = 0; i < n; i++) {
                const double scaled = weight * v[i];
                double *line = a + i * n;
#pragma GCC ivdep  // they do not overlap
                for (long j = i; j < n; j++) line[j] += scaled * v[j];  // the upper half
                x[i] += target * v[i];
            }
        }
        // a = u' u, with u in the upper half; then u' z = x and u x = z.
        for (long k = 0; k < n; k++) {
            double *pivot = a + k * n;
            if (!(pivot[k] > 0)) {
                failed = 2;
                break;
            }
            const double scale = 1 / std::sqrt(pivot[k]);
            for (long j = k; j < n; j++) pivot[j] *= scale;
            for (long i = k + 1; i < n; i++) {
                const double factor = pivot[i];
                double *line = a + i * n;
#pragma GCC ivdep
                for (long j = i; j < n; j++) line[j] -= factor * pivot[j];
            }
            x[k] /= pivot[k];
            for (long j = k + 1; j < n; j++) x[j] -= pivot[j] * x[k];
        }
        for (long k = n - 1; k >= 0 && !failed; k--) {
            for (long j = k + 1; j < n; j++) x[k] -= a[k * n + j] * x[j];
            x[k] /= a[k * n + k];
        }
    }
    std::free(a);
    return failed;
}
