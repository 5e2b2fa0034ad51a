// Operators of the fake device: memory, copies, and the CPU's kernels for all others.
#include <algorithm>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "support/fake_device_internal.h"

namespace distrain::testing::fake_device {

at::Tensor host_alias(const at::Tensor& tensor) {
  const auto options =
      at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU).layout(at::kStrided);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(host_of(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
}

at::Tensor Launch::operand(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (tensor.device().type() != kFake) {
    TORCH_CHECK(tensor.is_cpu() && tensor.dim() == 0,
                "Expected all tensors to be on the same device, but there is one on ",
                tensor.device(), " of shape ", tensor.sizes());
    return tensor.unsafeGetTensorImpl()->is_wrapped_number() ? tensor : tensor.clone();
  }
  TORCH_CHECK(!device_ || *device_ == tensor.device(),
              "Expected all tensors to be on the same device, but found ", *device_, " and ",
              tensor.device());
  device_ = tensor.device();
  if (tensor.numel() > 0) touched_.push_back(block_of(tensor.const_data_ptr()));
  return host_alias(tensor);
}

c10::Device Launch::device() const { return device_.value_or(fake(current_device())); }

void Launch::submit(std::function<void()> work) {
  const Lock lock;
  current_queue(device()).add(std::move(touched_), std::move(work));
}

void Launch::synchronize() const {
  Queue& queue = current_queue(device());
  const uint64_t end = [&queue] {
    const Lock lock;
    return queue.end();
  }();
  run_on_host(queue, end);
}

c10::IValue map_tensors(const c10::IValue& value,
                        const std::function<at::Tensor(const at::Tensor&)>& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional(change(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

at::Tensor empty_on(c10::Device device, const at::Tensor& like) {
  return at::empty_strided(like.sizes(), like.strides(),
                           at::TensorOptions().dtype(like.scalar_type()).device(device));
}

at::Tensor publish(c10::Device device, const at::Tensor& value) {
  if (!value.defined()) return value;
  const at::Tensor result = empty_on(device, value);
  Launch launch;
  at::Tensor there = launch.operand(result);
  launch.submit([there, value] { there.copy_(value); });
  return result;
}

namespace {

void count(FakeDeviceCopies FakeDeviceCounters::*kind, const at::Tensor& src) {
  const Lock lock;
  FakeDeviceCopies& copies = counters().*kind;
  ++copies.number;
  copies.bytes += src.numel() * static_cast<int64_t>(src.element_size());
}

void copy_to_host(const at::Tensor& dst, const at::Tensor& src, bool non_blocking) {
  count(&FakeDeviceCounters::device_to_host, src);
  Launch launch;
  const at::Tensor from = launch.operand(src);
  if (non_blocking && is_pinned(dst.const_data_ptr())) {
    launch.submit([dst = dst.detach(), from] { dst.copy_(from); });
    return;
  }
  launch.submit([&dst, from] { dst.copy_(from); });
  launch.synchronize();
}

void copy_from_host(const at::Tensor& dst, const at::Tensor& src, bool non_blocking) {
  count(&FakeDeviceCounters::host_to_device, src);
  Launch launch;
  const at::Tensor to = launch.operand(dst);
  const bool lazy = non_blocking && is_pinned(src.const_data_ptr());
  const at::Tensor from = lazy ? src.detach() : src.detach().clone();
  launch.submit([to, from] { to.copy_(from); });
  if (!non_blocking) launch.synchronize();
}

// Copies on the current stream of the source device. Waits before and after the copy order it with
// the current stream of the destination device.
void copy_between(const at::Tensor& dst, const at::Tensor& src) {
  count(&FakeDeviceCounters::device_to_device, src);
  const Lock lock;
  Queue& sender = current_queue(src.device());
  Queue& receiver = current_queue(dst.device());
  sender.add_wait(receiver, receiver.end());
  sender.add({block_of(src.const_data_ptr()), block_of(dst.const_data_ptr())},
             [to = host_alias(dst), from = host_alias(src)] { to.copy_(from); });
  receiver.add_wait(sender, sender.end());
}

void copy_tensor(const at::Tensor& dst, const at::Tensor& src, bool non_blocking) {
  const at::AutoDispatchBelowADInplaceOrView kernels_only;
  const at::Tensor from = src.expand(dst.sizes());
  if (dst.numel() == 0) return;
  if (!src.device().is_cpu() && dst.is_cpu()) return copy_to_host(dst, from, non_blocking);
  if (src.is_cpu()) return copy_from_host(dst, from, non_blocking);
  if (src.device() != dst.device()) return copy_between(dst, from);
  count(&FakeDeviceCounters::within_device, from);
  Launch launch;
  const at::Tensor there = launch.operand(dst);
  const at::Tensor here = launch.operand(from);
  launch.submit([there, here] { there.copy_(here); });
}

at::Tensor empty_memory_format(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
                               std::optional<at::Layout>, std::optional<at::Device> device,
                               std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &device_allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, strides, &device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype.value_or(at::kFloat));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  copy_tensor(self, src, non_blocking);
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  copy_tensor(dst, self, non_blocking);
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  if (self.sizes() != dst.sizes()) dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

void grow_storage(const at::Tensor& tensor, int64_t elements) {
  const size_t needed =
      static_cast<size_t>(tensor.storage_offset() + elements) * tensor.element_size();
  const c10::Storage& storage = tensor.storage();
  if (elements == 0 || storage.nbytes() >= needed) return;
  const c10::DeviceGuard guard(tensor.device());
  c10::DataPtr larger = device_allocator().allocate(needed);
  if (storage.nbytes() > 0) {
    device_allocator().copy_data(larger.get(), storage.data(), storage.nbytes());
  }
  storage.set_data_ptr_noswap(std::move(larger));
  storage.set_nbytes(needed);
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size,
                          std::optional<at::MemoryFormat> format) {
  if (self.sizes() == size && !format) return self;
  grow_storage(self, c10::multiply_integers(size));
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) {
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage storage, int64_t offset,
                        c10::IntArrayRef size, c10::IntArrayRef strides) {
  at::TensorImpl* const impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(size, strides);
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(),
                     source.strides());
}

at::Scalar local_scalar(const at::Tensor& self) {
  {
    const Lock lock;
    ++counters().scalars;
  }
  Launch launch;
  const at::Tensor value = launch.operand(self);
  at::Scalar result;
  launch.submit([&] { result = at::_local_scalar_dense(value); });
  launch.synchronize();
  return result;
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  if (self.numel() > 0) record_use(self.const_data_ptr(), stream);
}

// Returns a CPU tensor of the same shape, on which an operator runs to find its result's shape.
at::Tensor blank(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu()) return tensor;
  at::Tensor values =
      at::empty_strided(tensor.sizes(), tensor.strides(),
                        at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU));
  return values.fill_(at::isFloatingType(tensor.scalar_type()) ? 1 : 0);
}

using Values = std::vector<c10::IValue>;

// A call of any operator on the fake device. Runs the operator's CPU kernel on CPU tensors that
// share the memory of the operands.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack) : op_(op), stack_(stack) {
    const auto& schema = op.schema();
    arguments_ = torch::jit::last(stack, schema.arguments().size()).vec();
    for (const auto& argument : schema.arguments()) {
      writes_.push_back(argument.alias_info() && argument.alias_info()->isWrite());
    }
    for (const auto& result : schema.returns()) {
      TORCH_CHECK(!result.alias_info() || result.alias_info()->isWrite(), schema.name(),
                  " gives a view: on the fake device by hand only");
      in_place_ = in_place_ && result.alias_info();
    }
  }

  void run() {
    const at::AutoDispatchBelowADInplaceOrView kernels_only;
    Values results;
    const bool needs_values = op_.hasTag(at::Tag::nondeterministic_seeded) ||
                              op_.hasTag(at::Tag::dynamic_output_shape) ||
                              op_.hasTag(at::Tag::data_dependent_output);
    if (needs_values) {
      results = now();
    } else if (in_place_) {
      size_outputs();
      results = submit({});
    } else {
      Values shapes = computed(map_all(arguments_, blank));
      results = submit(std::move(shapes));
    }
    torch::jit::drop(stack_, arguments_.size());
    for (c10::IValue& result : results) stack_.push_back(std::move(result));
  }

 private:
  static Values map_all(const Values& values,
                        const std::function<at::Tensor(const at::Tensor&)>& change) {
    Values all;
    for (const c10::IValue& value : values) {
      all.push_back(value.isDevice() ? c10::IValue(c10::Device(c10::kCPU))
                                     : map_tensors(value, change));
    }
    return all;
  }

  Values computed(Values arguments) const {
    op_.callBoxed(arguments);
    return arguments;
  }

  c10::Device device_of(const Launch& launch) const {
    for (const c10::IValue& value : arguments_) {
      if (value.isDevice() && value.toDevice().has_index()) return value.toDevice();
    }
    return launch.device();
  }

  // Returns the arguments that the operator writes, which are its results.
  Values written() const {
    Values results;
    const auto& schema = op_.schema();
    for (const auto& result : schema.returns()) {
      for (size_t i = 0; i < arguments_.size(); ++i) {
        const auto* const alias = schema.arguments()[i].alias_info();
        if (!writes_[i] || alias->beforeSet() != result.alias_info()->beforeSet()) continue;
        results.push_back(arguments_[i]);
        break;
      }
    }
    return results;
  }

  // Resizes each empty output argument to the shape of the operator's result.
  void size_outputs() {
    bool any = false;
    for (size_t i = 0; i < arguments_.size(); ++i) any = any || is_empty_output(i);
    if (!any) return;
    Values blanks = map_all(arguments_, blank);
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (is_empty_output(i)) blanks[i] = at::empty({0}, blanks[i].toTensor().options());
    }
    const Values kept = blanks;
    computed(std::move(blanks));
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (is_empty_output(i)) resize_(arguments_[i].toTensor(), kept[i].toTensor().sizes(), {});
    }
  }
  bool is_empty_output(size_t i) const {
    return writes_[i] && op_.schema().arguments()[i].kwarg_only() && arguments_[i].isTensor() &&
           arguments_[i].toTensor().defined() && arguments_[i].toTensor().numel() == 0;
  }

  // Enqueues the operator. `shapes` has the shapes of new results; none if results are arguments.
  Values submit(Values shapes) {
    Launch launch;
    Values aliases = map_all(arguments_, [&](const at::Tensor& t) { return launch.operand(t); });
    launch.set_device(device_of(launch));
    if (in_place_) {
      launch.submit([op = op_, aliases = std::move(aliases)] {
        Values stack = aliases;
        op.callBoxed(stack);
      });
      return written();
    }
    std::vector<at::Tensor> outputs;
    const auto output = [&](const at::Tensor& shape) {
      if (!shape.defined()) return shape;
      TORCH_CHECK(shape.layout() == at::kStrided, op_.schema().name(),
                  " on the fake device by hand only");
      at::Tensor made = empty_on(launch.device(), shape);
      outputs.push_back(launch.operand(made));
      return made;
    };
    Values results = map_all(shapes, output);
    launch.submit([op = op_, aliases = std::move(aliases), outputs = std::move(outputs)] {
      Values stack = aliases;
      op.callBoxed(stack);
      auto next = outputs.begin();
      for (const c10::IValue& value : stack) {
        map_tensors(value, [&](const at::Tensor& result) {
          if (result.defined()) at::Tensor(*next++).copy_(result);
          return result;
        });
      }
    });
    return results;
  }

  // Computes the results at once, after the earlier work of the stream, because their shapes or
  // random numbers depend on the operands' values. Work on the stream still writes the results.
  Values now() {
    const Lock lock;
    Launch launch;
    std::vector<std::pair<at::Tensor, at::Tensor>> changed;
    Values values;
    const Values aliases =
        map_all(arguments_, [&](const at::Tensor& t) { return launch.operand(t); });
    launch.set_device(device_of(launch));
    launch.synchronize();
    for (size_t i = 0; i < aliases.size(); ++i) {
      values.push_back(!writes_[i] ? aliases[i]
                                   : map_tensors(aliases[i], [&](const at::Tensor& alias) {
                                       return changed.emplace_back(alias, alias.clone()).second;
                                     }));
    }
    for (size_t i = 0; i < values.size(); ++i) {
      if (op_.schema().arguments()[i].name() != "generator") continue;
      const int device = launch.device().index();
      values[i] = cpu_generator(
          values[i].isNone() ? default_generator(device) : values[i].toGenerator(), device);
    }
    values = computed(std::move(values));
    if (in_place_) {
      launch.submit([changed = std::move(changed)] {
        for (auto& [alias, value] : changed) at::Tensor(alias).copy_(value);
      });
      return written();
    }
    return map_all(values, [&](const at::Tensor& t) { return publish(launch.device(), t); });
  }

  const c10::OperatorHandle op_;
  torch::jit::Stack& stack_;
  Values arguments_;
  std::vector<bool> writes_;
  bool in_place_ = true;
};

void any_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, *stack).run();
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operator>());
}

}  // namespace

}  // namespace distrain::testing::fake_device
