// Packed blocks: their parts are consecutive, they fill whole cache lines, and packing keeps all data of random blocks.
#include <cmath>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include "core/dtype.h"
#include "kernels/layout.h"

using namespace ckdist;

namespace {

void parts_fit(const char* name, const BlockLayout& layout) {
  CAPTURE(name);
  CHECK(layout.columns % kGroupColumns == 0);
  CHECK(layout.planes() % 64 == 0);
  CHECK(layout.head() <= layout.planes());
  CHECK(layout.tail() - layout.planes() == layout.columns / 32 * (layout.low_bytes() + layout.high_bytes()));
  CHECK(layout.used() <= layout.bytes());
  CHECK(layout.bytes() % 64 == 0);
  CHECK(layout.bytes() - layout.used() < 64);
  if (!layout.codebook) CHECK(layout.largest_code() < 256);
}

template <Type type>
void packs_rows_as_they_are(int rows, int64_t cols) {
  const TypeTraits& traits = type_traits(type);
  CAPTURE(traits.name);
  const int64_t row_bytes = cols / traits.block_elements * traits.block_bytes;
  std::mt19937 bits(rows);
  std::vector<std::vector<uint8_t>> stored(rows, std::vector<uint8_t>(row_bytes));
  for (auto& row : stored)
    for (auto& byte : row) byte = uint8_t(bits());
  std::vector<const uint8_t*> pointers;
  for (const auto& row : stored) pointers.push_back(row.data());
  std::vector<uint8_t> whole(Tiles<type>::tile_bytes(cols)), alone(whole.size());
  Tiles<type>::pack(pointers.data(), rows, cols, whole.data());
  std::vector<float> of_tile(cols), of_row(cols);
  for (int row = 0; row < rows; row++) {  // a row's values do not depend on its neighbours
    Tiles<type>::unpack_row(whole.data(), row, cols, of_tile.data());
    Tiles<type>::pack(&pointers[row], 1, cols, alone.data());
    Tiles<type>::unpack_row(alone.data(), 0, cols, of_row.data());
    for (int64_t i = 0; i < cols; i++) {
      const bool same = of_tile[i] == of_row[i] || (std::isnan(of_tile[i]) && std::isnan(of_row[i]));
      REQUIRE(same);
    }
  }
}

}  // namespace

TEST_CASE("the parts of a packed block follow one another and fill cache lines") {
#define CHECK_TYPE(type) parts_fit(#type, layout_of(Type::type));
  CKDIST_EACH_BLOCK_TYPE(CHECK_TYPE)
#undef CHECK_TYPE
}

TEST_CASE("a packed row has the same values beside any other rows") {
#define CHECK_TYPE(type)                       \
  packs_rows_as_they_are<Type::type>(16, 512); \
  packs_rows_as_they_are<Type::type>(5, 256);
  CKDIST_EACH_TYPE(CHECK_TYPE)
#undef CHECK_TYPE
}
