#pragma once

#include <map>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>

#include <torch/csrc/autograd/variable.h>

#include "distrain/autograd/context.h"
#include "distrain/base/future.h"
#include "streams.h"

namespace distrain::autograd {

class ContextState;

// Note [Distributed backward]
//
// Each rank runs its own part of the graph, between its send and receive nodes. In FAST mode, a
// rank first counts for each node the edges that reach it from the context's send nodes on this
// rank and, on the initiator, from the roots. It assumes that every send node will get a gradient.
// A node runs when it has received a gradient over each counted edge.
//
//  - A receive node sends its gradients to the rank that the tensors came from, by a call whose
//    reply is the acknowledgement.
//  - AccumulateGrad never runs: the context captures a leaf's gradient. Pre-hooks change it;
//    post-hooks are called afterwards, without outputs, as in torch's DistEngine.
//
// The end of a pass is found by Dijkstra and Scholten's termination detection (Inf. Proc. Letters
// 11, 1980). A rank acknowledges the message that woke it when no node is ready or runs and all of
// its own messages are acknowledged. It acknowledges other messages at once. The initiator wakes
// itself; when it is idle, all ranks are.
//
// An acknowledgement carries, for each rank that its sender knows of, the number of send nodes that
// wait for a gradient, with a version; the newest version wins. The last report of each rank
// reaches the initiator, because the rank's waker has not sent its own last report by then. If a
// count is above zero at the end, the roots do not depend on a tensor that the rank has sent.

/// Represents tensors that this rank sent. The gradients of the tensors enter the graph here.
struct SendNode final : torch::autograd::Node {
  SendNode(int to_in, uint64_t answered_in, const std::vector<at::Tensor>& tensors)
      : to(to_in), answered(answered_in) {
    for (const at::Tensor& tensor : tensors) {
      add_input_metadata(tensor);
      add_next_edge(torch::autograd::impl::gradient_edge(tensor));
    }
  }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    return std::move(grads);
  }
  std::string name() const override { return "distrain::SendBackward"; }

  const int to;             // the rank that received the tensors
  const uint64_t answered;  // the call by `to` that the tensors answer; 0: they are arguments
};

/// Represents tensors that came from another rank. Pass sends their gradients back to that rank.
/// Torch's own engine cannot do so, so apply() throws.
struct RecvNode final : torch::autograd::Node {
  RecvNode(uint64_t context_in, uint64_t autograd_id_in, int from_in)
      : context(context_in), autograd_id(autograd_id_in), from(from_in) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override {
    base::invalid("this graph goes on on rank " + std::to_string(from) +
                  ": use distrain::autograd::backward(context, {loss}) in place of "
                  "loss.backward()");
  }
  std::string name() const override { return "distrain::RecvBackward"; }

  const uint64_t context;
  const uint64_t autograd_id;
  const int from;
};

/// The state of a pass on one rank, sent in acknowledgements.
struct PassReport {
  uint64_t version = 0;
  uint32_t waiting = 0;  ///< number of send nodes that wait for a gradient
  static constexpr auto kFields = std::tuple(&PassReport::version, &PassReport::waiting);
};
using PassReports = std::map<int32_t, PassReport>;

/// One backward pass on one rank. Thread-safe: any thread may bring gradients, and then runs the
/// ready nodes unless another thread does. So the nodes of a pass run one at a time, as in torch on
/// the CPU. See Note [Streams of a backward pass] for accelerators.
class Pass : public std::enable_shared_from_this<Pass> {
 public:
  Pass(rpc::Agent& agent, uint64_t id, PassOptions options)
      : agent_(agent), id_(id), options_(options) {}

  uint64_t id() const { return id_; }

  /// Counts the dependencies of all nodes before the pass runs. Only the initiator has `roots`.
  void prepare(const std::shared_ptr<ContextState>& context, const std::vector<at::Tensor>& roots);

  /// Runs the ready nodes and hooks on the initiator. The future is done when all ranks are done.
  base::Future<void> run_roots(const std::vector<at::Tensor>& roots);

  /// Adds the gradients for a send node. If this rank was idle, sends `reply` when the rank is idle
  /// again, otherwise at once.
  void receive(const std::shared_ptr<SendNode>& node, torch::autograd::variable_list grads,
               rpc::ReplyPtr reply);

  /// Fails the pass on this rank and drops its hooks. Does nothing if the context has a newer pass.
  void fail(const base::Error& error);
  /// Fails the pending reply (`waker_`), calls `between`, then fails the future of run_roots().
  void end(const base::Error& error, const std::function<void()>& between = {});

  /// Makes this thread's current streams wait for all work of the pass on this rank.
  void join_streams() {
    std::unique_lock lock(mutex_);
    const std::vector<c10::Stream> streams = streams_;
    lock.unlock();
    wait_for_streams(streams);
  }

 private:
  struct Ready {
    std::shared_ptr<torch::autograd::Node> node;
    torch::autograd::InputBuffer inputs;

    // Orders nodes as torch's engine does. AccumulateGrad has the highest sequence number, so hooks
    // get, and can reduce, a leaf's gradient as early as possible.
    bool operator<(const Ready& other) const {
      return node->sequence_nr() < other.node->sequence_nr();
    }
  };
  struct Waiting {
    int dependencies = 0;  // number of missing gradients
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
  void finish_if_idle();
  base::Status outcome_of(PassReports reports) const;

  rpc::Agent& agent_;
  const uint64_t id_;
  const PassOptions options_;
  std::weak_ptr<ContextState> context_;

  std::mutex mutex_;
  // The roots' edges; empty except on the initiator. They own AccumulateGrad nodes of leaf roots.
  std::vector<torch::autograd::Edge> roots_;
  // Plain pointers are safe because the context's send nodes and the roots own the graph.
  std::unordered_map<torch::autograd::Node*, Waiting> waiting_;
  std::vector<Ready> ready_;  // a heap, ordered by operator<
  uint32_t sends_waiting_ = 0;
  size_t nodes_left_ = 0;             // nodes that have not run
  std::vector<c10::Stream> streams_;  // streams of the nodes and hooks that have run
  bool is_running_ = false;           // a thread runs the ready nodes
  int unacknowledged_ = 0;
  std::set<uint64_t> returned_;  // autograd ids of the messages that this rank sent gradients for
  std::optional<rpc::ReplyPtr> waker_;  // while awake, the reply to send when idle; initiator: null
  std::optional<base::Promise<void>> done_;  // the future of run_roots()
  bool end_hooks_due_ = false;
  std::optional<base::Error> error_;
  uint64_t version_ = 0;
  PassReports reports_;
};

}  // namespace distrain::autograd
