#pragma once
#define CKDIST_EXPORT __attribute__((visibility("default")))
