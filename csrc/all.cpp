// The extension as one translation unit: torch's headers, which are most of the work, are read once.
#include "bucket_checks.cpp"
#include "bucket_engine.cpp"
#include "bucket_gradients.cpp"
#include "bucket_launch.cpp"
#include "bucket_memory.cpp"
#include "collectives.cpp"
#include "module.cpp"
#include "shared_sums.cpp"
