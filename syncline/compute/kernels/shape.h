// A convolution's sizes, as Python passes them: of images, kernels, steps and paddings; and how many threads there are.

#pragma once

struct Shape {
    int samples, height, width, channels, outputs;
    int kernel_height, kernel_width, row_step, column_step, row_padding, column_padding;
    int output_height, output_width;
    int threads;
};
