// Products of single rows with LoRA's matrices have the bits of products of many rows, on every level of this CPU.
#include <doctest/doctest.h>

#include <cstring>
#include <vector>

#include "kernels/half.h"
#include "kernels/kernels.h"

using namespace ckdist;

namespace {

constexpr int kTiles = 7, kColumns = 80, kRows = kTiles * kTileRows - 5;

// Tiles of numbers that are exact in float16.
std::vector<uint8_t> tiles_of(Type type) {
  std::vector<uint8_t> tiles(size_t(kTiles) * kColumns * kTileRows * (type == Type::f16 ? 2 : 4));
  for (int i = 0; i < kTiles * kColumns * kTileRows; ++i) {
    const float value = float(i * 7919 % 2039 - 1019) / 1024;
    const uint16_t half = half_of_float(value);
    if (type == Type::f16) std::memcpy(tiles.data() + 2 * i, &half, 2);
    else std::memcpy(tiles.data() + 4 * i, &value, 4);
  }
  return tiles;
}

}  // namespace

TEST_CASE("single rows have the bits of many") {
  std::vector<float> x(kColumnPad);
  for (int i = 0; i < kColumns; ++i) x[size_t(i)] = float(i * 31 % 101) / 37 - 1;
  for (const Level& level : levels()) {
    if (!level.lacks.empty()) continue;
    CAPTURE(level.kernels->name);
    for (const Type type : {Type::f32, Type::f16}) {
      const std::vector<uint8_t> tiles = tiles_of(type);
      const int64_t tile_bytes = int64_t(tiles.size()) / kTiles;
      const Matrix matrix{type, kRows, kColumns, tile_bytes, tiles.data()};
      std::vector<float> expected(kTiles * kTileRows, 0.5f), found = expected, sums(kTiles * kTileRows);
      level.kernels->linear[int(type)].multiply(matrix, 0, kTiles, reinterpret_cast<const uint8_t*>(x.data()), 0, 1,
                                                sums.data(), kTiles * kTileRows);
      std::vector<float> alone(kTiles * kTileRows);
      std::vector<TileProduct> products;
      for (int tile = 0; tile < kTiles; ++tile)
        products.push_back({tiles.data() + tile * tile_bytes, x.data(), alone.data() + tile * kTileRows});
      level.kernels->low_rank.multiply(type == Type::f16, products.data(), kTiles, kColumns);
      CHECK(std::memcmp(alone.data(), sums.data(), kRows * sizeof(float)) == 0);
      level.kernels->elementwise.add(sums.data(), kRows, expected.data());
      level.kernels->low_rank.add(type == Type::f16, tiles.data(), tile_bytes, kRows, kColumns, x.data(), found.data());
      CHECK(std::memcmp(found.data(), expected.data(), expected.size() * sizeof(float)) == 0);
    }
  }
}
