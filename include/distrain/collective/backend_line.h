#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "distrain/base/future.h"
#include "distrain/base/serial_thread.h"
#include "distrain/collective/backend.h"
#include "distrain/collective/reduce_group.h"
#include "distrain/rpc/device.h"

namespace distrain::collective {

/// Calls of a Backend in the order in which they are asked for. One that has something to wait for
/// is made by a thread of the line, and so are those behind it. While the line is empty, what has
/// nothing to wait for is called at once, so that CPU users neither start nor meet a thread.
///
/// Thread-safe, but the order is the user's. The destructor sees to all that was asked for.
class BackendLine {
 public:
  /// `name`: of the thread, at most 15 characters. `sequence`: the calls' sequence in the Backend.
  BackendLine(c10::intrusive_ptr<Backend> backend, std::string name, uint32_t sequence = 0);

  // Of tensors of the CPU.
  ReduceGroup::WorkPtr mean(const at::Tensor& tensor, const PassNumber& pass);
  ReduceGroup::WorkPtr broadcast(const at::Tensor& tensor, int root);

  void refuse(int count, const base::Error& error);

  /// What `call` asks of the Backend, once `copied` is reached. If that fails this rank refuses.
  base::Future<Pending> call_behind(rpc::StreamPoint copied, std::function<Pending()> call);
  /// In its turn, on the thread of the line. Must not throw.
  void post(base::Task task) { line_.post(std::move(task)); }

 private:
  ReduceGroup::WorkPtr call(std::function<Pending()> call);

  const c10::intrusive_ptr<Backend> backend_;
  const uint32_t sequence_;
  base::SerialThread line_;
};

}  // namespace distrain::collective
