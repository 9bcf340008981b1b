"""One module tree, many owners: partition, hollow modules, stages, and the runtime that follows a program."""
