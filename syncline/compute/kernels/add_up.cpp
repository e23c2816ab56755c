// Overwrite several arrays with their weighted sum, in one pass over memory.

namespace {

template <int NUMBER>
void add(float *const *copies, const float *weights, long count) {
    float *at[NUMBER], factor[NUMBER];
    for (int r = 0; r < NUMBER; r++) at[r] = copies[r], factor[r] = weights[r];
#pragma GCC ivdep  // they do not overlap
    for (long i = 0; i < count; i++) {
        float sum = factor[0] * at[0][i];
        for (int r = 1; r < NUMBER; r++) sum += factor[r] * at[r][i];
        for (int r = 0; r < NUMBER; r++) at[r][i] = sum;
    }
}

}  // namespace

// Returns 0, or 1 if there are too many copies; then nothing was done.
extern "C" int add_copies(float *const *copies, int number, const float *weights, long count) {
    switch (number) {
        case 1: add<1>(copies, weights, count); return 0;
        case 2: add<2>(copies, weights, count); return 0;
        case 3: add<3>(copies, weights, count); return 0;
        case 4: add<4>(copies, weights, count); return 0;
        case 5: add<5>(copies, weights, count); return 0;
        case 6: add<6>(copies, weights, count); return 0;
        case 7: add<7>(copies, weights, count); return 0;
        case 8: add<8>(copies, weights, count); return 0;
        default: return 1;
    }
}
