#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <vector>

#include <torch/csrc/autograd/input_buffer.h>

#include "distrain/autograd/context.h"
#include "distrain/base/future.h"
#include "distrain/rpc/agent.h"
#include "nodes.h"
#include "streams.h"

namespace distrain::autograd {

class ContextState;

// Note [Distributed backward]
//
// Each rank runs its own part of the graph, between its send and receive nodes. FAST mode: before
// anything runs, a rank counts for each of its nodes the edges that lead to it from all of the
// context's send nodes here (on the initiator: from the roots too), and takes it for granted that
// every send node will be given a gradient. A node runs when it has got as many as were counted.
//
//  - A receive node sends its gradients to the rank the tensors came from: a call, answered by an
//    acknowledgement.
//  - A leaf's gradient is captured in the context; AccumulateGrad itself never runs. Its hooks do:
//    those before it change the gradient, those behind it (post_hooks()) are called without outputs
//    when the context has the gradient, as torch's DistEngine calls them.
//
// When is it over? Dijkstra and Scholten's termination detection (Inf. Proc. Letters 11, 1980): the
// message that wakes an idle rank is acknowledged only when the rank is idle again (nothing ready,
// nothing running) and all its own messages are acknowledged; any other message at once. The
// initiator wakes itself, and when it is idle the whole job is. Cycles are harmless.
//
// An acknowledgement tells how many send nodes still wait for a gradient, of the rank and of all it
// has heard of; each such count has a version, and the newest wins. The last word of each rank
// reaches the initiator, as a rank that sends its last word has a waker that has not sent its own
// yet. So a count above zero at the end is an output that the roots do not depend on.

/// What a rank's last acknowledgement says of it.
struct PassReport {
  uint64_t version = 0;
  uint32_t waiting = 0;  ///< send nodes without a gradient
  static constexpr auto kFields = std::tuple(&PassReport::version, &PassReport::waiting);
};
using PassReports = std::map<int32_t, PassReport>;

/// One backward pass on one rank. Thread-safe: any thread may bring gradients; whoever finds no one
/// running the ready nodes does it, so nodes of a pass run one at a time, as in torch on the CPU.
/// What they put into streams runs as Note [Streams of a backward pass] has it.
class Pass : public std::enable_shared_from_this<Pass> {
 public:
  Pass(rpc::Agent& agent, uint64_t id, PassOptions options)
      : agent_(agent), id_(id), options_(options) {}

  uint64_t id() const { return id_; }

  /// Counts the dependencies: first of all, once. `roots` are the initiator's.
  void prepare(const std::shared_ptr<ContextState>& context, const std::vector<at::Tensor>& roots);

  /// On the initiator: runs its part and is done when the whole pass is. Blocks as a hook does.
  base::Future<void> run_roots(const std::vector<at::Tensor>& roots);

  /// Gradients for a send node have come; `reply` acknowledges them in time.
  void receive(const std::shared_ptr<SendNode>& node, torch::autograd::variable_list grads,
               rpc::ReplyPtr reply);

  /// Ends the pass here, with the context's hooks; nothing if the context has a newer one.
  void fail(const base::Error& error);
  /// Fails all who wait for this pass: other ranks before `between` is called, the initiator after.
  void end(const base::Error& error, const std::function<void()>& between = {});

  /// Makes this thread's current streams wait for all that the pass has done on this rank.
  void join_streams();

 private:
  struct Ready {
    std::shared_ptr<torch::autograd::Node> node;
    torch::autograd::InputBuffer inputs;
  };
  struct Waiting {
    int dependencies = 0;  // gradients that have not come yet
    std::optional<torch::autograd::InputBuffer> inputs;
  };

  void run_ready();
  void execute(Ready ready);
  void execute_recv(RecvNode& node, torch::autograd::variable_list grads);
  void capture(torch::autograd::Node& accumulate, torch::autograd::variable_list grads);
  void announce(const std::shared_ptr<ContextState>& context, const at::Tensor& variable);
  void call_end_hooks(ContextState& context);
  void deliver_locked(const torch::autograd::Edge& edge, at::Tensor gradient,
                      const std::optional<c10::Stream>& producer);
  void on_acknowledged(base::Result<rpc::RawReply>& reply);
  void settle();

  rpc::Agent& agent_;
  const uint64_t id_;
  const PassOptions options_;
  std::weak_ptr<ContextState> context_;

  std::mutex mutex_;
  // The initiator's. A leaf's edge is all that keeps its AccumulateGrad.
  std::vector<torch::autograd::Edge> roots_;
  // A node is kept alive by the graph, which the context's send nodes and the roots hold.
  std::unordered_map<torch::autograd::Node*, Waiting> waiting_;
  std::vector<Ready> ready_;  // a heap: later in the forward pass first, as torch does
  uint32_t sends_waiting_ = 0;
  size_t nodes_left_ = 0;             // that have not run
  std::vector<c10::Stream> streams_;  // of nodes and hooks that have run
  bool is_running_ = false;           // a thread runs the ready nodes
  int unacknowledged_ = 0;
  std::optional<rpc::ReplyPtr> waker_;       // awake: whom to acknowledge; null: the initiator
  std::optional<base::Promise<void>> done_;  // the initiator's
  bool end_hooks_due_ = false;
  std::optional<base::Error> error_;
  uint64_t version_ = 0;
  PassReports heard_;
};

}  // namespace distrain::autograd
