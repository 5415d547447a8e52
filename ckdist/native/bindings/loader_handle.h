#pragma once
#include "runtime/loader.h"

struct ckdist_loader {
  explicit ckdist_loader(const std::vector<std::string>& paths) : loader(paths) {}
  ckdist::Loader loader;
};
