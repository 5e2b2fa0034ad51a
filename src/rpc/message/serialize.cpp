#include "distrain/rpc/serialize.h"

#include <ATen/DeviceGuard.h>
#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "device/device_table.h"

namespace distrain::rpc {

namespace {

using wire::DType;

// The most common types come first, because find() searches linearly.
constexpr std::pair<at::ScalarType, DType> kDTypes[] = {
    {at::kFloat, DType::kFloat32},
    {at::kLong, DType::kInt64},
    {at::kDouble, DType::kFloat64},
    {at::kBFloat16, DType::kBFloat16},
    {at::kHalf, DType::kFloat16},
    {at::kByte, DType::kUInt8},
    {at::kBool, DType::kBool},
    {at::kInt, DType::kInt32},
    {at::kShort, DType::kInt16},
    {at::kChar, DType::kInt8},
    {at::kUInt16, DType::kUInt16},
    {at::kUInt32, DType::kUInt32},
    {at::kUInt64, DType::kUInt64},
    {at::kComplexFloat, DType::kComplex64},
    {at::kComplexDouble, DType::kComplex128},
    {at::kComplexHalf, DType::kComplex32},
    {at::kFloat8_e5m2, DType::kFloat8E5M2},
    {at::kFloat8_e4m3fn, DType::kFloat8E4M3},
    {at::kFloat8_e5m2fnuz, DType::kFloat8E5M2Fnuz},
    {at::kFloat8_e4m3fnuz, DType::kFloat8E4M3Fnuz},
    {at::kFloat8_e8m0fnu, DType::kFloat8E8M0},
};

const auto* find(at::ScalarType type) {
  return std::ranges::find(kDTypes, type, &std::pair<at::ScalarType, DType>::first);
}

// Precedes a tensor in the body (u8). The tensor's parts are the message's next 1 or 2 tensors.
enum class TensorTag : uint8_t { kUndefined = 0, kDense = 1, kSparse = 2 };

// Returns `tensor` without gaps (row-major or channels-last) and without lazy conj or neg bits.
at::Tensor make_plain(const at::Tensor& tensor) {
  const bool has_layout =
      tensor.is_contiguous() ||
      (tensor.dim() == 4 && tensor.is_contiguous(at::MemoryFormat::ChannelsLast)) ||
      (tensor.dim() == 5 && tensor.is_contiguous(at::MemoryFormat::ChannelsLast3d));
  if (has_layout && !tensor.is_conj() && !tensor.is_neg()) return tensor;
  // Autograd records these operations, unless the caller disabled it, so gradients pass through.
  return tensor.resolve_conj().resolve_neg().contiguous();
}

// Returns the device on which `tensor` arrives on rank `to`.
wire::DeviceRef arrival_of(const at::Tensor& tensor, const DeviceTable* devices, int to) {
  if (!is_accelerator(tensor.device())) return {};
  if (devices) return devices->target(to, tensor.device());
  base::invalid("a tensor on " + tensor.device().str() + " where only the CPU's travel");
}

// Returns true if each index is in the range of its dimension. Torch's kernels do not check this.
bool are_in_range(const at::Tensor& indices, std::span<const int64_t> sizes) {
  const int64_t count = indices.size(1);
  const int64_t* at = indices.const_data_ptr<int64_t>();
  for (int64_t dim = 0; dim < indices.size(0); ++dim, at += count) {
    const auto size = static_cast<uint64_t>(sizes[static_cast<size_t>(dim)]);
    bool fits = true;  // no early exit, so that the loop can be vectorized
    for (int64_t i = 0; i < count; ++i) fits &= static_cast<uint64_t>(at[i]) < size;
    if (!fits) return false;
  }
  return true;
}

// Returns true if the indices are sorted and unique. Kernels that write in parallel need this.
bool are_increasing(const at::Tensor& indices) {
  const int64_t count = indices.size(1);
  const int64_t* at = indices.const_data_ptr<int64_t>();
  for (int64_t i = 1; i < count; ++i) {
    int64_t dim = 0;
    while (dim < indices.size(0) && at[dim * count + i - 1] == at[dim * count + i]) ++dim;
    if (dim == indices.size(0) || at[dim * count + i - 1] > at[dim * count + i]) return false;
  }
  return true;
}

}  // namespace

wire::DType to_dtype(at::ScalarType type) {
  if (const auto* found = find(type); found != std::end(kDTypes)) return found->second;
  base::invalid(c10::str("tensors of dtype ", type, " cannot be sent or saved"));
}

at::ScalarType to_scalar_type(wire::DType dtype) {
  const auto* found = std::ranges::find(kDTypes, dtype, &std::pair<at::ScalarType, DType>::second);
  if (found == std::end(kDTypes)) wire::Reader::fail("an unknown tensor dtype");
  return found->first;
}

std::string kind_that_cannot_be_sent(const at::Tensor& tensor) {
  const bool is_sparse = tensor.layout() == at::kSparse;
  if (tensor.is_nested()) return "a nested tensor";
  if (!is_sparse && tensor.layout() != at::kStrided) {
    return c10::str("a tensor of layout ", tensor.layout());
  }
  if (tensor.is_quantized()) return "a quantized tensor";
  if (find(tensor.scalar_type()) == std::end(kDTypes)) {
    return c10::str("a tensor of dtype ", tensor.scalar_type());
  }
  if (tensor.is_meta()) return "a tensor on the device meta";
  // True for functorch's wrappers, lazily allocated zeros, and storage that was resized to 0.
  if (!is_sparse && (!tensor.has_storage() || (tensor.numel() > 0 && !tensor.storage().data()))) {
    return "a tensor without memory";
  }
  return {};
}

void Encoder::put_tensor(const at::Tensor& tensor) {
  const auto add = [this](const at::Tensor& dense, bool requires_grad) {
    message.devices.push_back(arrival_of(dense, devices, to));
    message.tensors.push_back(dense);
    message.requires_grad.push_back(requires_grad);
  };
  if (!tensor.defined()) return out.put(TensorTag::kUndefined);
  if (const std::string kind = kind_that_cannot_be_sent(tensor); !kind.empty()) {
    base::invalid(kind + " cannot be sent");
  }
  const bool requires_grad = at::GradMode::is_enabled() && tensor.requires_grad();
  if (tensor.layout() == at::kStrided) {
    out.put(TensorTag::kDense);
    return add(make_plain(tensor), requires_grad);
  }
  // Gradients flow through values(), which autograd provides only for coalesced tensors.
  const at::Tensor sparse = requires_grad ? tensor.coalesce() : tensor;
  out.put(TensorTag::kSparse);
  out.put(sparse.is_coalesced());
  out.put(static_cast<uint8_t>(sparse.dim()));
  for (const int64_t size : sparse.sizes()) out.put(size);
  add(make_plain(sparse._indices().detach()), false);
  add(make_plain(requires_grad ? sparse.values() : sparse._values().detach()), requires_grad);
}

at::Tensor Decoder::get_tensor() {
  const auto take = [this]() -> at::Tensor& {
    if (next_tensor >= message.tensors.size()) wire::Reader::fail("a tensor is missing");
    return message.tensors[next_tensor++];
  };
  switch (in.get<TensorTag>()) {
    case TensorTag::kUndefined:
      return {};
    case TensorTag::kDense:
      return take();
    case TensorTag::kSparse: {
      const bool said_coalesced = in.get<bool>();
      const std::vector<int64_t> sizes = wire::decode_sizes(in, wire::decode_dimensions(in), 1);
      // The check of the indices must hold for those that the kernels read.
      const at::Tensor indices = message.is_shared ? take().clone() : take();
      const at::Tensor& values = take();
      // Makes the same checks as torch's own constructor, at lower cost.
      const auto dims = static_cast<int64_t>(sizes.size());
      bool fits = indices.device() == values.device() && indices.dim() == 2 &&
                  indices.scalar_type() == at::kLong && values.dim() >= 1 &&
                  indices.size(1) == values.size(0) && indices.size(0) + values.dim() - 1 == dims;
      for (int64_t i = 1; fits && i < values.dim(); ++i) {
        fits = values.size(i) == sizes[static_cast<size_t>(indices.size(0) + i - 1)];
      }
      if (!fits) wire::Reader::fail("a sparse tensor whose parts do not fit together");
      const at::Tensor readable =
          is_accelerator(indices.device()) ? to_host({indices})[0] : indices.contiguous();
      if (!are_in_range(readable, sizes)) {
        wire::Reader::fail("a sparse tensor with an index beyond its size");
      }
      const c10::OptionalDeviceGuard guard(at::device_of(values));  // for the tensor below
      const at::AutoGradMode recording(values.requires_grad());
      return at::_sparse_coo_tensor_unsafe(indices, values, sizes,
                                           values.options().layout(at::kSparse),
                                           said_coalesced && are_increasing(readable));
    }
  }
  wire::Reader::fail("an unknown kind of tensor");
}

// Encodes a u8 wire::DType, then the value in 8 bytes, or in 16 bytes if the value is complex.
void Serializer<at::Scalar>::encode(Encoder& encoder, const at::Scalar& value) {
  if (value.isSymbolic()) base::invalid("a symbolic scalar cannot be sent");
  encoder.out.put(to_dtype(value.type()));
  if (value.isComplex()) {
    encoder.out.put(value.toComplexDouble().real());
    encoder.out.put(value.toComplexDouble().imag());
  } else if (value.isFloatingPoint()) {
    encoder.out.put(value.toDouble());
  } else if (value.type() == at::kUInt64) {
    encoder.out.put(value.toUInt64());
  } else {
    encoder.out.put(value.to<int64_t>());
  }
}

at::Scalar Serializer<at::Scalar>::decode(Decoder& decoder) {
  switch (decoder.in.get<wire::DType>()) {
    case wire::DType::kBool:
      return decoder.in.get<int64_t>() != 0;
    case wire::DType::kInt64:
      return decoder.in.get<int64_t>();
    case wire::DType::kUInt64:
      return decoder.in.get<uint64_t>();
    case wire::DType::kFloat64:
      return decoder.in.get<double>();
    case wire::DType::kComplex128: {
      const auto real = decoder.in.get<double>();
      return c10::complex<double>(real, decoder.in.get<double>());
    }
    default:
      wire::Reader::fail("an unknown type of scalar");
  }
}

}  // namespace distrain::rpc
