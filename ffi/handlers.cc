// The XLA FFI handlers (attention has its own file) and the plain C functions: all that the library exports. No
// arithmetic here.
#include "handlers.h"

#include <optional>
#include <vector>

#include "activation.h"
#include "low_rank.h"
#include "matvec.h"
#include "norm.h"
#include "panel_product.h"
#include "sparse_ffn.h"
#include "thread_pool.h"

namespace pjax {
namespace {

namespace ffi = xla::ffi;

using Vector32 = ffi::BufferR1<ffi::F32>;
using Matrix32 = ffi::BufferR2<ffi::F32>;
using Mask = ffi::BufferR2<ffi::PRED>;
using CountsResult = ffi::ResultBufferR2<ffi::S32>;
using PackedRows = ffi::BufferR2<ffi::U8>;
using MatrixResult = ffi::ResultBufferR2<ffi::F32>;
using WordResult = ffi::ResultBufferR0<ffi::U32>;
using AddressResult = ffi::ResultBufferR1<ffi::U32>;

std::optional<WeightType> TypeOf(const ffi::AnyBuffer& buffer) {
  if (buffer.element_type() == ffi::F32) return WeightType::kFloat32;
  if (buffer.element_type() == ffi::BF16) return WeightType::kBfloat16;
  if (buffer.element_type() == ffi::F16) return WeightType::kFloat16;
  return std::nullopt;
}

// The attribute "format" of packed rows; 0 stands for plain arrays.
std::optional<WeightType> TypeOfFormat(int64_t format) {
  if (format == 1) return WeightType::kQ8_0;
  if (format == 2) return WeightType::kQ4_0;
  return std::nullopt;
}

ffi::Error ExpectWholeBlocks(const char* name, int64_t size, const RowKernels& kernels) {
  if (size % kernels.columns_per_scale == 0) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(std::string(name) + ": expected a width that is a multiple of " +
                                     std::to_string(kernels.columns_per_scale) + ", got " + std::to_string(size));
}

// What both FFN handlers take beside the rows.
struct FfnOperands {
  Matrix32 x;
  Vector32 gate_bias, up_bias;
  Mask mask;
  MatrixResult y;
  CountsResult counts;
  std::string_view activation;
  float threshold;
  bool every_neuron;
};

// Checks all but the rows and fills in what does not depend on them.
ffi::Error ReadOperands(FfnOperands& operands, int64_t neurons, int64_t model, FfnArgs* args) {
  const int64_t batch = operands.x.dimensions()[0];
  const std::optional<Activation> activation = ActivationNamed(operands.activation, operands.threshold);
  if (!activation) return ffi::Error::InvalidArgument("activation: not known: " + std::string(operands.activation));
  PJAX_RETURN_IF_ERROR(Expect("x", operands.x.dimensions(), {batch, model}));
  for (const auto& [name, bias] :
       {std::pair{"gate_bias", &operands.gate_bias}, std::pair{"up_bias", &operands.up_bias}}) {
    if (bias->element_count() > 0) PJAX_RETURN_IF_ERROR(Expect(name, bias->dimensions(), {neurons}));
  }
  if (operands.mask.element_count() > 0) {
    PJAX_RETURN_IF_ERROR(Expect("mask", operands.mask.dimensions(), {batch, neurons}));
  }
  PJAX_RETURN_IF_ERROR(Expect("y", operands.y->dimensions(), {batch, model}));
  PJAX_RETURN_IF_ERROR(Expect("counts", operands.counts->dimensions(), {3, batch}));
  args->gate_bias = IfPresent(operands.gate_bias.typed_data(), operands.gate_bias.element_count());
  args->up_bias = IfPresent(operands.up_bias.typed_data(), operands.up_bias.element_count());
  args->x = operands.x.typed_data();
  args->mask =
      IfPresent(reinterpret_cast<const uint8_t*>(operands.mask.typed_data()), operands.mask.element_count());
  args->batch = batch;
  args->neurons = neurons;
  args->model = model;
  args->y = operands.y->typed_data();
  args->predicted = operands.counts->typed_data();
  args->computed = args->predicted + batch;
  args->active = args->computed + batch;
  args->activation = *activation;
  args->every_neuron = operands.every_neuron;
  return ffi::Error::Success();
}

ffi::Error SparseFfnImpl(Matrix32 x, ffi::AnyBuffer gate, ffi::AnyBuffer up, ffi::AnyBuffer down, Vector32 gate_bias,
                         Vector32 up_bias, Mask mask, MatrixResult y, CountsResult counts, std::string_view activation,
                         float threshold, bool every_neuron) {
  if (up.dimensions().size() != 2) return ffi::Error::InvalidArgument("up: expected shape [neurons, model]");
  const int64_t neurons = up.dimensions()[0], model = up.dimensions()[1];
  const std::optional<WeightType> type = TypeOf(up);
  if (!type) return ffi::Error::InvalidArgument("up: expected float32, bfloat16 or float16");
  for (const auto& [name, matrix] : {std::pair{"gate", &gate}, std::pair{"down", &down}}) {
    if (matrix->element_type() != up.element_type()) {
      return ffi::Error::InvalidArgument(std::string(name) + ": expected the type of up");
    }
    if (matrix == &gate && gate.element_count() == 0) continue;
    PJAX_RETURN_IF_ERROR(Expect(name, matrix->dimensions(), {neurons, model}));
  }
  FfnOperands operands{x, gate_bias, up_bias, mask, y, counts, activation, threshold, every_neuron};
  FfnArgs args;
  PJAX_RETURN_IF_ERROR(ReadOperands(operands, neurons, model, &args));
  const RowKernels& kernels = KernelsFor(Level(), *type);
  args.gate = IfPresent(gate.untyped_data(), gate.element_count());
  args.up = up.untyped_data();
  args.down = down.untyped_data();
  args.row_stride = kernels.row_bytes(model);
  SparseFfn(args, kernels, ThreadPool::Process());
  return ffi::Error::Success();
}

ffi::Error PackedFfnImpl(Matrix32 x, PackedRows rows, Vector32 gate_bias, Vector32 up_bias, Mask mask, MatrixResult y,
                         CountsResult counts, int64_t format, bool gated, std::string_view activation, float threshold,
                         bool every_neuron) {
  const std::optional<WeightType> type = TypeOfFormat(format);
  if (!type) return ffi::Error::InvalidArgument("format: expected 1 (q8_0) or 2 (q4_0), got " + std::to_string(format));
  const RowKernels& kernels = KernelsFor(Level(), *type);
  const int64_t neurons = rows.dimensions()[0], model = x.dimensions()[1];
  PJAX_RETURN_IF_ERROR(ExpectWholeBlocks("x", model, kernels));
  const int64_t row_bytes = kernels.row_bytes(model), num_rows = gated ? 3 : 2;
  PJAX_RETURN_IF_ERROR(Expect("rows", rows.dimensions(), {neurons, num_rows * row_bytes}));
  FfnOperands operands{x, gate_bias, up_bias, mask, y, counts, activation, threshold, every_neuron};
  FfnArgs args;
  PJAX_RETURN_IF_ERROR(ReadOperands(operands, neurons, model, &args));
  const uint8_t* bundle = rows.typed_data();
  args.gate = gated ? bundle : nullptr;
  args.up = bundle + (num_rows - 2) * row_bytes;
  args.down = bundle + (num_rows - 1) * row_bytes;
  args.row_stride = num_rows * row_bytes;
  SparseFfn(args, kernels, ThreadPool::Process());
  return ffi::Error::Success();
}

// Rows of `columns` weights: a plain array [rows, columns], or packed ones, which begin at byte `offset` of each row of
// an array of bytes.
ffi::Error ReadRows(const ffi::AnyBuffer& weight, int64_t columns, int64_t format, int64_t offset, MatrixRows* rows) {
  if (weight.dimensions().size() != 2) return ffi::Error::InvalidArgument("weight: expected two axes");
  if (format < 0 || format > 2) {
    return ffi::Error::InvalidArgument("format: expected 0 (as stored), 1 (q8_0) or 2 (q4_0), got " +
                                       std::to_string(format));
  }
  const std::optional<WeightType> type = format == 0 ? TypeOf(weight) : TypeOfFormat(format);
  if (!type) return ffi::Error::InvalidArgument("weight: expected float32, bfloat16 or float16, or packed rows");
  const RowKernels& kernels = KernelsFor(Level(), *type);
  const int64_t count = weight.dimensions()[0], row_bytes = kernels.row_bytes(columns);
  int64_t stride = row_bytes;
  if (format == 0) {
    PJAX_RETURN_IF_ERROR(Expect("weight", weight.dimensions(), {count, columns}));
  } else {
    PJAX_RETURN_IF_ERROR(ExpectWholeBlocks("columns", columns, kernels));
    stride = weight.dimensions()[1];
    if (weight.element_type() != ffi::U8 || offset < 0 || offset + row_bytes > stride) {
      return ffi::Error::InvalidArgument("weight: expected uint8 rows of at least " +
                                         std::to_string(offset + row_bytes) + " bytes");
    }
  }
  *rows = {&kernels, static_cast<const char*>(weight.untyped_data()) + offset, count, stride};
  return ffi::Error::Success();
}

// Operands: x, then weight and bias of each product.
ffi::Error MatvecImpl(Matrix32 x, ffi::RemainingArgs weights, ffi::RemainingRets ys, ffi::Span<const int64_t> formats,
                      ffi::Span<const int64_t> offsets) {
  const int64_t batch = x.dimensions()[0], columns = x.dimensions()[1];
  const size_t count = ys.size();
  if (count == 0 || weights.size() != 2 * count || formats.size() != count || offsets.size() != count) {
    return ffi::Error::InvalidArgument("weights: expected a weight, a bias, a format and an offset for each result");
  }
  std::vector<MatvecArgs> products(count);
  const RowKernels* kernels = nullptr;
  size_t begin = 0;  // of the products of one type
  for (size_t i = 0; i < count; ++i) {
    auto weight = weights.get<ffi::AnyBuffer>(2 * i);
    auto bias = weights.get<Vector32>(2 * i + 1);
    auto y = ys.get<Matrix32>(i);
    if (!weight.has_value() || !bias.has_value() || !y.has_value()) {
      return ffi::Error::InvalidArgument("bias, y: expected float32 [rows] and [batch, rows]");
    }
    MatrixRows rows;
    PJAX_RETURN_IF_ERROR(ReadRows(*weight, columns, formats[i], offsets[i], &rows));
    if (bias->element_count() > 0) PJAX_RETURN_IF_ERROR(Expect("bias", bias->dimensions(), {rows.count}));
    PJAX_RETURN_IF_ERROR(Expect("y", (*y)->dimensions(), {batch, rows.count}));
    if (i > begin && rows.kernels != kernels) {
      Matvecs(&products[begin], i - begin, *kernels, ThreadPool::Process());
      begin = i;
    }
    kernels = rows.kernels;
    const float* bias_data = IfPresent(bias->typed_data(), bias->element_count());
    products[i] = {rows.data, rows.stride, bias_data, x.typed_data(), batch, rows.count, columns, (*y)->typed_data()};
  }
  Matvecs(&products[begin], count - begin, *kernels, ThreadPool::Process());
  return ffi::Error::Success();
}

ffi::Error LowRankMaskImpl(Matrix32 x, ffi::AnyBuffer first, ffi::AnyBuffer second, Vector32 bias,
                           ffi::BufferR0<ffi::F32> threshold, ffi::ResultBufferR2<ffi::PRED> mask,
                           int64_t first_format, int64_t second_format) {
  LowRankArgs args = {};
  args.batch = x.dimensions()[0];
  args.columns = x.dimensions()[1];
  PJAX_RETURN_IF_ERROR(ReadRows(first, args.columns, first_format, 0, &args.first));
  PJAX_RETURN_IF_ERROR(ReadRows(second, args.first.count, second_format, 0, &args.second));
  PJAX_RETURN_IF_ERROR(Expect("bias", bias.dimensions(), {args.second.count}));
  PJAX_RETURN_IF_ERROR(Expect("mask", mask->dimensions(), {args.batch, args.second.count}));
  args.bias = bias.typed_data();
  args.threshold = *threshold.typed_data();
  args.x = x.typed_data();
  args.mask = mask->typed_data();
  LowRankMask(args, ThreadPool::Process());
  return ffi::Error::Success();
}

ffi::Error CombineRowsImpl(Matrix32 x, ffi::AnyBuffer weight, MatrixResult y, int64_t format, int64_t offset) {
  const int64_t batch = x.dimensions()[0], columns = y->dimensions()[1];
  MatrixRows rows;
  PJAX_RETURN_IF_ERROR(ReadRows(weight, columns, format, offset, &rows));
  PJAX_RETURN_IF_ERROR(Expect("x", x.dimensions(), {batch, rows.count}));
  PJAX_RETURN_IF_ERROR(Expect("y", y->dimensions(), {batch, columns}));
  CombineRows({rows.data, rows.stride, x.typed_data(), batch, rows.count, columns, y->typed_data()}, *rows.kernels,
              ThreadPool::Process());
  return ffi::Error::Success();
}

ffi::Error NormImpl(Matrix32 x, Vector32 scale, Vector32 bias, MatrixResult y, bool centered, float eps) {
  const int64_t batch = x.dimensions()[0], model = x.dimensions()[1];
  for (const auto& [name, weight] : {std::pair{"scale", &scale}, std::pair{"bias", &bias}}) {
    if (weight->element_count() > 0) PJAX_RETURN_IF_ERROR(Expect(name, weight->dimensions(), {model}));
  }
  PJAX_RETURN_IF_ERROR(Expect("y", y->dimensions(), {batch, model}));
  Norm({x.typed_data(), IfPresent(scale.typed_data(), scale.element_count()),
        IfPresent(bias.typed_data(), bias.element_count()), batch, model, centered, eps, y->typed_data()});
  return ffi::Error::Success();
}

ffi::Error StreamSumImpl(ffi::AnyBuffer x, WordResult sum) {
  const RowKernels& kernels = KernelsFor(Level(), WeightType::kFloat32);
  *sum->typed_data() = StreamSum(x.untyped_data(), x.size_bytes(), kernels, ThreadPool::Process());
  return ffi::Error::Success();
}

// For tests: where the operand lies, as its lower and upper 32 bits. Shows whether XLA copied a weight.
ffi::Error AddressImpl(ffi::AnyBuffer x, AddressResult address) {
  PJAX_RETURN_IF_ERROR(Expect("address", address->dimensions(), {2}));
  const auto value = reinterpret_cast<uintptr_t>(x.untyped_data());
  address->typed_data()[0] = static_cast<uint32_t>(value);
  address->typed_data()[1] = static_cast<uint32_t>(static_cast<uint64_t>(value) >> 32);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace pjax

extern "C" {
PJAX_EXPORT XLA_FFI_Error* pjax_sparse_ffn(XLA_FFI_CallFrame*);
PJAX_EXPORT XLA_FFI_Error* pjax_packed_ffn(XLA_FFI_CallFrame*);
PJAX_EXPORT XLA_FFI_Error* pjax_matvec(XLA_FFI_CallFrame*);
PJAX_EXPORT XLA_FFI_Error* pjax_low_rank_mask(XLA_FFI_CallFrame*);
PJAX_EXPORT XLA_FFI_Error* pjax_norm(XLA_FFI_CallFrame*);
PJAX_EXPORT XLA_FFI_Error* pjax_combine_rows(XLA_FFI_CallFrame*);
PJAX_EXPORT XLA_FFI_Error* pjax_stream_sum(XLA_FFI_CallFrame*);
PJAX_EXPORT XLA_FFI_Error* pjax_address(XLA_FFI_CallFrame*);

// major << 16 | minor of the FFI headers this was compiled with; a jaxlib accepts its own version and older ones.
PJAX_EXPORT uint32_t pjax_ffi_api_version() { return XLA_FFI_API_MAJOR << 16 | XLA_FFI_API_MINOR; }

// Checks the environment variables; null, or what is wrong with them. To be called once, before any handler.
PJAX_EXPORT const char* pjax_init() {
  static const std::string* error = [] {
    auto* text = new std::string;
    pjax::ChooseCpuLevel(getenv("PJAX_CPU"), text);
    if (text->empty()) pjax::NumThreads(getenv("PJAX_NUM_THREADS"), text);
    return text;
  }();
  return error->empty() ? nullptr : error->c_str();
}
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(pjax_sparse_ffn, pjax::SparseFfnImpl,
                              xla::ffi::Ffi::Bind()
                                  .Arg<pjax::Matrix32>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<pjax::Vector32>()
                                  .Arg<pjax::Vector32>()
                                  .Arg<pjax::Mask>()
                                  .Ret<pjax::Matrix32>()
                                  .Ret<xla::ffi::BufferR2<xla::ffi::S32>>()
                                  .Attr<std::string_view>("activation")
                                  .Attr<float>("threshold")
                                  .Attr<bool>("every_neuron"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(pjax_packed_ffn, pjax::PackedFfnImpl,
                              xla::ffi::Ffi::Bind()
                                  .Arg<pjax::Matrix32>()
                                  .Arg<pjax::PackedRows>()
                                  .Arg<pjax::Vector32>()
                                  .Arg<pjax::Vector32>()
                                  .Arg<pjax::Mask>()
                                  .Ret<pjax::Matrix32>()
                                  .Ret<xla::ffi::BufferR2<xla::ffi::S32>>()
                                  .Attr<int64_t>("format")
                                  .Attr<bool>("gated")
                                  .Attr<std::string_view>("activation")
                                  .Attr<float>("threshold")
                                  .Attr<bool>("every_neuron"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(pjax_matvec, pjax::MatvecImpl,
                              xla::ffi::Ffi::Bind()
                                  .Arg<pjax::Matrix32>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<xla::ffi::Span<const int64_t>>("formats")
                                  .Attr<xla::ffi::Span<const int64_t>>("offsets"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(pjax_low_rank_mask, pjax::LowRankMaskImpl,
                              xla::ffi::Ffi::Bind()
                                  .Arg<pjax::Matrix32>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<pjax::Vector32>()
                                  .Arg<xla::ffi::BufferR0<xla::ffi::F32>>()
                                  .Ret<xla::ffi::BufferR2<xla::ffi::PRED>>()
                                  .Attr<int64_t>("first_format")
                                  .Attr<int64_t>("second_format"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(pjax_combine_rows, pjax::CombineRowsImpl,
                              xla::ffi::Ffi::Bind()
                                  .Arg<pjax::Matrix32>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<pjax::Matrix32>()
                                  .Attr<int64_t>("format")
                                  .Attr<int64_t>("offset"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(pjax_norm, pjax::NormImpl,
                              xla::ffi::Ffi::Bind()
                                  .Arg<pjax::Matrix32>()
                                  .Arg<pjax::Vector32>()
                                  .Arg<pjax::Vector32>()
                                  .Ret<pjax::Matrix32>()
                                  .Attr<bool>("centered")
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(pjax_stream_sum, pjax::StreamSumImpl,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::BufferR0<xla::ffi::U32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(pjax_address, pjax::AddressImpl,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::BufferR1<xla::ffi::U32>>());
