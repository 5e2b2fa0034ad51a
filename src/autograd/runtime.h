#pragma once

#include <algorithm>

#include "context_state.h"
#include "distrain/autograd/parameter_versions.h"
#include "distrain/rpc/autograd_hook.h"

namespace distrain::autograd {

/// Distributed autograd of one agent: its contexts and its hook for messages.
///
/// On channel 1, tag a is the context and tag b the message:
///   kReleased    tag c is the start of a range of ended contexts, see below.
///   kPassFailed  tag c is the pass; the payload is the error.
///   kGivenUp     tag c is the number of a call that the sender has given up.
/// A rank forwards kReleased and kPassFailed once to the ranks that it shares the context with.
///
/// A late message must not create a released context again. So the release of a context carries the
/// first number of the range of ended contexts that the context completes, and each rank remembers
/// these ranges. Adjacent ranges merge, so there are at most as many ranges as contexts alive.
class Runtime final : public rpc::AutogradHook,
                      public rpc::Layer,
                      public std::enable_shared_from_this<Runtime> {
 public:
  explicit Runtime(rpc::Agent& agent) : agent_(agent) {}

  void install();
  static std::shared_ptr<Runtime> of(rpc::Agent& agent);

  ParameterLock parameters_lock;
  ParameterStreams parameter_streams;
  std::vector<std::weak_ptr<VersionKeeper>> version_keepers;  // guarded by parameters_lock

  uint64_t new_id() {
    return rpc::make_id(rpc::process_number(agent_.rank() + 1, agent_.incarnation()), ++counter_);
  }
  std::shared_ptr<ContextState> create() {
    std::lock_guard lock(mutex_);
    const uint64_t id = new_id();  // under the lock: release() needs ids in order of creation
    return contexts_.emplace(id, std::make_shared<ContextState>(id)).first->second;
  }
  std::shared_ptr<ContextState> find(uint64_t id) const {
    std::lock_guard lock(mutex_);
    const auto it = contexts_.find(id);
    return it == contexts_.end() ? nullptr : it->second;
  }
  /// Throws `invalid` if the context has ended, or the rank-loss error if its creator is lost.
  std::shared_ptr<ContextState> find_or_create(uint64_t id);
  /// Releases the context on this rank and on all other ranks that have a part of it.
  void release(uint64_t id);
  /// Fails the pass on all other ranks that have a part of the context.
  void fail_pass(uint64_t context, uint64_t pass, const base::Error& error);

  uint64_t on_send(uint64_t context, int to, uint64_t answered,
                   const std::vector<at::Tensor>& tensors) override;
  void on_failed(uint64_t context, uint64_t autograd_id) override {
    if (autograd_id == 0) return;
    if (const auto state = find(context)) throw_away(state->remove_send(autograd_id));
  }
  void on_given_up(uint64_t context, int to, uint64_t call) override;
  void on_receive(uint64_t context, rpc::InMessage& message, const std::string& function) override;
  at::Tensor hold(const at::Tensor& parameter) override {
    const std::shared_lock lock(parameters_lock);
    parameter_streams.read(parameter);
    return parameter.variable_data();
  }
  size_t live_contexts() const override {
    std::lock_guard lock(mutex_);
    return contexts_.size();
  }
  size_t live_passes() const override {
    std::lock_guard lock(mutex_);
    return std::ranges::count_if(contexts_, [](auto& entry) { return entry.second->runs(); });
  }
  /// Ends the contexts that the lost rank created, and fails the passes over these contexts.
  void on_rank_lost(const rpc::Loss& loss) override;

 private:
  std::shared_ptr<ContextState> take_locked(uint64_t first_ended, uint64_t id);
  void on_message_on_loop(const rpc::ChannelMessage& message);
  void on_gradients(rpc::Decoder& in, const rpc::ReplyPtr& reply);
  void on_given_up_by(uint64_t context, int caller, uint64_t call);
  void throw_away(std::shared_ptr<const void> graph) {
    if (!graph) return;
    std::lock_guard lock(mutex_);
    trash_.push_back(std::move(graph));
  }
  void empty_trash() {
    std::vector<std::shared_ptr<const void>> trash;
    std::lock_guard lock(mutex_);
    trash.swap(trash_);
  }
  void tell(const ContextState& context, const rpc::ChannelTag& tag,
            std::shared_ptr<const wire::Bytes> payload, int but);

  rpc::Agent& agent_;
  rpc::Channel* channel_ = nullptr;
  std::atomic<uint64_t> counter_{0};
  mutable std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<ContextState>> contexts_;  // release() needs ids in order
  std::map<rpc::ProcessNumber, base::Error> lost_;  // lost ranks, whose contexts are refused
  std::map<uint64_t, uint64_t> ended_;              // ranges of ended contexts: last id -> first id
  // Contexts and nodes that the loop thread released. on_send() and on_gradients() destroy them,
  // because the user's graphs and hooks must not be destroyed on the loop thread.
  std::vector<std::shared_ptr<const void>> trash_;
};

/// The remote function that receives gradients for a send node.
inline constexpr const char* kGradientsFunction = "distrain.autograd.gradients";

}  // namespace distrain::autograd
