"""A run, or several, as one page that opens without a network, and as files for TensorBoard: `syncline report RUN`."""
