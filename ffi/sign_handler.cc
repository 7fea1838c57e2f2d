// The XLA FFI handler of the sign scores.
#include "handlers.h"
#include "sign_scores.h"
#include "thread_pool.h"

namespace pjax {
namespace {

namespace ffi = xla::ffi;

using Matrix32 = ffi::BufferR2<ffi::F32>;

ffi::Error SignScoresImpl(Matrix32 x, ffi::BufferR2<ffi::U32> bits, ffi::BufferR0<ffi::F32> slope,
                          ffi::BufferR1<ffi::F32> bias, ffi::ResultBufferR2<ffi::F32> y) {
  const int64_t batch = x.dimensions()[0], columns = x.dimensions()[1], rows = bits.dimensions()[0];
  PJAX_RETURN_IF_ERROR(Expect("bits", bits.dimensions(), {rows, SignWords(columns)}));
  PJAX_RETURN_IF_ERROR(Expect("bias", bias.dimensions(), {rows}));
  PJAX_RETURN_IF_ERROR(Expect("y", y->dimensions(), {batch, rows}));
  SignScores({bits.typed_data(), *slope.typed_data(), bias.typed_data(), x.typed_data(), batch, rows, columns,
              y->typed_data()},
             SignKernelsFor(Level()), ThreadPool::Process());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace pjax

extern "C" PJAX_EXPORT XLA_FFI_Error* pjax_sign_scores(XLA_FFI_CallFrame*);

XLA_FFI_DEFINE_HANDLER_SYMBOL(pjax_sign_scores, pjax::SignScoresImpl,
                              xla::ffi::Ffi::Bind()
                                  .Arg<pjax::Matrix32>()
                                  .Arg<xla::ffi::BufferR2<xla::ffi::U32>>()
                                  .Arg<xla::ffi::BufferR0<xla::ffi::F32>>()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::F32>>()
                                  .Ret<xla::ffi::BufferR2<xla::ffi::F32>>());
