// Products with matrices, and their gradients with respect to the input and the matrices.
#include "runtime/steps/packs.h"
#include "runtime/steps/products.h"

namespace ckdist {
namespace {

template <class Fields>
struct ProductRun : TrainingRun<Fields> {
  Products products() const { return {this->r, this->thread, this->index}; }
  // Carves the strips of the product's x; null if it has none.
  uint8_t* strips_of(Carver& c, const Product& product) const {
    const int64_t bytes = Products::strips_bytes(this->r, product.matrix.cols, product.tokens);
    return bytes ? c.bytes(bytes) : nullptr;
  }
};

struct Matmul : ProductRun<ckdist_matmul_step> {
  static int64_t thread_bytes(const Training& r, const Fields& step) {
    int64_t bytes = Products::thread_bytes(r);
    for (int m = 0; m < step.count; ++m) bytes = std::max(bytes, pack_thread_bytes(r, step.products[m].pack));
    return bytes;
  }
  static int64_t workspace_bytes(const Training& r, const Fields& step) {
    return carved_bytes([&](Carver& c) {
      StepPacks packs;
      for (int m = 0; m < step.count; ++m) packs.add(r, c, step.products[m].pack);
      c.bytes(Products::strips_bytes(r, r.width(step.x), r.program.max_tokens));
    });
  }

  void run() {
    Carver c{r.workspace()};
    StepPacks packs;
    Product made[Products::kMost];
    for (int m = 0; m < step.count; ++m) {
      const ckdist_matmul& p = step.products[m];
      // x: (tokens, cols), out: (tokens, rows)
      made[m] = {packs.add(r, c, p.pack),
                 r.operand(step.x),
                 r.batch.tokens,
                 p.out,
                 p.bias < 0 ? nullptr : r.parameter(p.bias),
                 p.residual};
    }
    uint8_t* const strips = strips_of(c, made[0]);
    for (int m = 0; m < step.count; ++m) made[m].strips = strips;
    make_packs(r, thread, index, packs);
    products().multiply(made, step.count);
  }
};

struct MatmulGrad : ProductRun<ckdist_matmul_grad_step> {
  static int64_t thread_bytes(const Training& r, const Fields& step) {
    return std::max(Products::thread_bytes(r), pack_thread_bytes(r, step.pack));
  }
  static int64_t workspace_bytes(const Training& r, const Fields& step) {
    return carved_bytes([&](Carver& c) {
      StepPacks{}.add(r, c, step.pack);
      c.bytes(Products::strips_bytes(r, r.packed(step.pack).cols, r.program.max_tokens));
    });
  }

  void run() {
    Carver c{r.workspace()};
    StepPacks packs;
    // dx = dy W. Several dy lie side by side from dy[0] on.
    Product product{packs.add(r, c, step.pack), r.operand(step.dy[0]), r.batch.tokens, step.dx};
    product.strips = strips_of(c, product);
    make_packs(r, thread, index, packs);
    products().multiply(&product, 1);
  }
};

struct WeightGrad : ProductRun<ckdist_weight_grad_step> {
  static int64_t thread_bytes(const Training& r, const Fields&) { return Products::thread_bytes(r); }
  static int64_t workspace_bytes(const Training& r, const Fields& step) {
    return tiles_of(r.width(step.x)) * r.tile_bytes(r.program.max_tokens);
  }

  void run() {
    const int64_t cols = r.width(step.x), tokens = r.batch.tokens;
    products().transpose_all(r.operand(step.x), cols, tokens, r.workspace());
    Outer outers[Products::kMost];
    for (int i = 0; i < step.count; ++i) {
      const ckdist_gradient& g = step.gradients[i];
      // gradient (rows, cols) = dy^T x, with dy: (tokens, rows)
      outers[i] = {r.operand(g.dy), r.width(g.dy), r.gradient(g.gradient), r.adds(g.fresh)};
    }
    products().add_outer(r.matrix(cols, tokens, r.workspace()), tokens, outers, step.count);
  }
};

const RegisteredKind<Matmul> kMatmul(ckdist_step_matmul);
const RegisteredKind<MatmulGrad> kMatmulGrad(ckdist_step_matmul_grad);
const RegisteredKind<WeightGrad> kWeightGrad(ckdist_step_weight_grad);

}  // namespace
}  // namespace ckdist
