// The extension as one translation unit: torch's headers, which are most of the work, are read once.
#include "bucket_checks.cpp"
#include "bucket_engine.cpp"
#include "bucket_gradients.cpp"
#include "bucket_launch.cpp"
#include "bucket_memory.cpp"
#include "collectives.cpp"
#include "handover.cpp"
#include "module.cpp"
#include "shared_sums.cpp"

#if __has_include(<Python.h>)  // else Python does the steps of each call
#include "python_module.cpp"
#endif
