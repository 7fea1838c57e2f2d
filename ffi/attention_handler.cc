// The XLA FFI handler of attention. No arithmetic here.
#include "attention.h"

#include <optional>

#include "handlers.h"

namespace pjax {
namespace {

namespace ffi = xla::ffi;

using Vectors32 = ffi::BufferR3<ffi::F32>;
using Cache = ffi::AnyBuffer;

std::optional<WeightType> CacheTypeOf(const Cache& cache) {
  if (cache.element_type() == ffi::F32) return WeightType::kFloat32;
  if (cache.element_type() == ffi::U16) return WeightType::kBfloat16;
  return std::nullopt;
}

// XLA copies an operand that it may not overwrite, so operand and result are always one buffer.
ffi::Error ExpectAliased(const char* name, const Cache& cache, const Cache& result) {
  if (cache.untyped_data() == result.untyped_data()) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(std::string(name) + ": expected the result to be the operand's buffer");
}

ffi::Error DecodeAttentionImpl(Vectors32 q, Vectors32 k, Vectors32 v, Cache k_cache, Cache v_cache,
                               ffi::BufferR1<ffi::S32> positions, ffi::BufferR2<ffi::F32> rotation,
                               ffi::BufferR1<ffi::F32> slopes, ffi::ResultBufferR2<ffi::F32> y,
                               ffi::Result<Cache> new_k_cache, ffi::Result<Cache> new_v_cache, int64_t first_slot,
                               int64_t window) {
  const int64_t batch = q.dimensions()[0], heads = q.dimensions()[1], head_dim = q.dimensions()[2];
  if (k_cache.dimensions().size() != 4) {
    return ffi::Error::InvalidArgument("k_cache: expected shape [slots, kv_heads, capacity, head_dim]");
  }
  const int64_t slots = k_cache.dimensions()[0], kv_heads = k_cache.dimensions()[1], capacity = k_cache.dimensions()[2];
  if (first_slot < 0 || first_slot + batch > slots) {
    return ffi::Error::InvalidArgument("first_slot: expected room for " + std::to_string(batch) + " of " +
                                       std::to_string(slots) + " slots, got " + std::to_string(first_slot));
  }
  const std::optional<WeightType> type = CacheTypeOf(k_cache);
  if (!type || k_cache.element_type() != v_cache.element_type()) {
    return ffi::Error::InvalidArgument("k_cache, v_cache: expected both float32 or both uint16");
  }
  if (kv_heads == 0 || heads % kv_heads != 0 || capacity == 0 || head_dim == 0) {
    return ffi::Error::InvalidArgument("k_cache: expected kv_heads to divide heads = " + std::to_string(heads) +
                                       ", and no axis of size 0, got " + ShapeText(k_cache.dimensions()));
  }
  PJAX_RETURN_IF_ERROR(Expect("k", k.dimensions(), {batch, kv_heads, head_dim}));
  PJAX_RETURN_IF_ERROR(Expect("v", v.dimensions(), {batch, kv_heads, head_dim}));
  PJAX_RETURN_IF_ERROR(Expect("k_cache", k_cache.dimensions(), {slots, kv_heads, capacity, head_dim}));
  PJAX_RETURN_IF_ERROR(Expect("v_cache", v_cache.dimensions(), {slots, kv_heads, capacity, head_dim}));
  PJAX_RETURN_IF_ERROR(Expect("positions", positions.dimensions(), {batch}));
  const int64_t width = rotation.dimensions()[1];
  PJAX_RETURN_IF_ERROR(Expect("rotation", rotation.dimensions(), {batch, width}));
  if (width % 2 != 0 || width > head_dim) {
    return ffi::Error::InvalidArgument("rotation: expected an even width of at most head_dim = " +
                                       std::to_string(head_dim) + ", got " + std::to_string(width));
  }
  if (slopes.element_count() > 0) PJAX_RETURN_IF_ERROR(Expect("slopes", slopes.dimensions(), {heads}));
  if (window < 0) return ffi::Error::InvalidArgument("window: expected at least 0, got " + std::to_string(window));
  PJAX_RETURN_IF_ERROR(Expect("y", y->dimensions(), {batch, heads * head_dim}));
  PJAX_RETURN_IF_ERROR(ExpectAliased("k_cache", k_cache, *new_k_cache));
  PJAX_RETURN_IF_ERROR(ExpectAliased("v_cache", v_cache, *new_v_cache));

  AttentionArgs args;
  args.q = q.typed_data();
  args.k = k.typed_data();
  args.v = v.typed_data();
  const int64_t skipped = first_slot * kv_heads * capacity * head_dim * (*type == WeightType::kFloat32 ? 4 : 2);
  args.k_cache = static_cast<char*>(new_k_cache->untyped_data()) + skipped;
  args.v_cache = static_cast<char*>(new_v_cache->untyped_data()) + skipped;
  args.positions = positions.typed_data();
  args.rotation = rotation.typed_data();
  args.slopes = IfPresent(slopes.typed_data(), slopes.element_count());
  args.batch = batch;
  args.heads = heads;
  args.kv_heads = kv_heads;
  args.head_dim = head_dim;
  args.capacity = capacity;
  args.half = width / 2;
  args.window = window;
  args.y = y->typed_data();
  DecodeAttention(args, *type, AttentionKernelsFor(Level(), *type), ThreadPool::Process());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace pjax

extern "C" PJAX_EXPORT XLA_FFI_Error* pjax_decode_attention(XLA_FFI_CallFrame*);

XLA_FFI_DEFINE_HANDLER_SYMBOL(pjax_decode_attention, pjax::DecodeAttentionImpl,
                              xla::ffi::Ffi::Bind()
                                  .Arg<pjax::Vectors32>()
                                  .Arg<pjax::Vectors32>()
                                  .Arg<pjax::Vectors32>()
                                  .Arg<pjax::Cache>()
                                  .Arg<pjax::Cache>()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::S32>>()
                                  .Arg<xla::ffi::BufferR2<xla::ffi::F32>>()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::F32>>()
                                  .Ret<xla::ffi::BufferR2<xla::ffi::F32>>()
                                  .Ret<pjax::Cache>()
                                  .Ret<pjax::Cache>()
                                  .Attr<int64_t>("first_slot")
                                  .Attr<int64_t>("window"));
