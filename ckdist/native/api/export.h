/* Marks the functions of the library, which Python calls by their plain names. The headers of this folder are C, apart
   from this mark: the build reads their declarations for Python (cmake/declarations.py). */
#pragma once
#include <stdint.h>
#define CKDIST_EXPORT extern "C" __attribute__((visibility("default")))
