// How error messages name the point of a step at which ranks meet.
#pragma once
#include <cstdio>

#include "comm/group.h"

namespace ckdist {

struct Place {
  char text[24];
};

inline Place place(int step) {
  Place p;
  if (step == kStart) std::snprintf(p.text, sizeof p.text, "the start");
  else std::snprintf(p.text, sizeof p.text, "step %d", step);
  return p;
}

}  // namespace ckdist
