#include "distrain/store/named_tensors.h"

#include <sstream>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "distrain/base/error.h"
#include "distrain/rpc/device.h"

namespace distrain::store {

rpc::NamedTensors on_host(const rpc::NamedTensors& tensors) {
  rpc::NamedTensors copies = tensors;
  std::vector<at::Tensor> of_devices;
  for (auto& [name, tensor] : copies) {
    if (!tensor.defined()) continue;
    tensor = tensor.detach();
    if (!tensor.is_cpu()) of_devices.push_back(tensor);
  }
  if (of_devices.empty()) return copies;
  const std::vector<at::Tensor> on_cpu = rpc::to_host(of_devices);
  auto next = on_cpu.begin();
  for (auto& [name, tensor] : copies) {
    if (tensor.defined() && !tensor.is_cpu()) tensor = *next++;
  }
  return copies;
}

rpc::NamedTensors copies_on_host(const rpc::NamedTensors& tensors) {
  rpc::NamedTensors copies = on_host(tensors);
  for (auto& [name, copy] : copies) {
    const at::Tensor& tensor = tensors.at(name);
    if (tensor.defined() && tensor.is_cpu()) copy = copy.clone();
    if (tensor.defined() && tensor.requires_grad()) copy.set_requires_grad(true);
  }
  return copies;
}

rpc::NamedTensors named_tensors(const std::string& name, const torch::nn::Module& module) {
  rpc::NamedTensors named;
  for (const auto& item : module.named_parameters()) named[name + "." + item.key()] = item.value();
  for (const auto& item : module.named_buffers()) named[name + "." + item.key()] = item.value();
  return named;
}

void copy_into(const rpc::NamedTensors& live, const rpc::NamedTensors& saved) {
  const at::NoGradGuard no_grad;
  for (const auto& [name, into] : live) {
    const auto it = saved.find(name);
    if (it == saved.end()) base::bad_data("no " + name);
    if (it->second.sizes() != into.sizes() || it->second.scalar_type() != into.scalar_type()) {
      base::bad_data(name + " has another shape or dtype");
    }
    at::Tensor(into).copy_(it->second);
  }
  for (const auto& [name, tensor] : saved) {
    if (!live.contains(name)) base::bad_data("it has " + name + ", which the model has not");
  }
}

void copy_into(const rpc::NamedTensors& live, const SafetensorsFile& saved) {
  for (const auto& [name, into] : live) {
    rpc::NamedTensors one;
    if (saved.tensors().contains(name)) one[name] = saved.tensor(name);
    copy_into({{name, into}}, one);
  }
  for (const auto& [name, info] : saved.tensors()) {
    if (!live.contains(name)) copy_into({}, {{name, at::Tensor()}});
  }
}

void naming_file(const std::string& path, const std::function<void()>& use) {
  try {
    use();
  } catch (const base::Exception& e) {
    const std::string& why = e.error().message;
    if (e.kind() != base::ErrorKind::kBadData || why.starts_with(path + ": ")) throw;
    base::bad_data(path + ": " + why);
  }
}

at::Tensor tensor_of_words(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += word + '\n';
  return at::from_blob(text.data(), {std::ssize(text)}, at::kByte).clone();
}

std::vector<std::string> words_of_tensor(const at::Tensor& text) {
  const at::Tensor bytes = text.to(at::kByte).contiguous();
  const auto* const first = bytes.const_data_ptr<uint8_t>();
  std::istringstream lines(std::string(first, first + bytes.numel()));
  std::vector<std::string> words;
  for (std::string word; std::getline(lines, word);) words.push_back(word);
  return words;
}

}  // namespace distrain::store
