#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "context_state.h"
#include "distrain/autograd/context.h"
#include "distrain/autograd/parameter_versions.h"
#include "distrain/rpc/agent.h"
#include "distrain/rpc/autograd_hook.h"
#include "streams.h"

namespace distrain::autograd {

/// Distributed autograd of one agent: its contexts, and what it does to messages.
///
/// Messages on channel 1: tag a is the context, tag b says what: released, or a pass (tag c) that
/// has failed, with the error as payload. A rank forwards both to those that it sent messages of
/// the context to, once. Or that the sender has given up its call with the number of tag c.
///
/// A late message must not create a released context again. The rank that made the context sends,
/// in tag c of the release, the first number of the run of ended contexts that this context closes;
/// the context before that number is still alive. So each rank remembers released contexts as
/// ranges of numbers. Adjacent ranges merge: no more ranges than contexts alive at one time.
class Runtime final : public rpc::AutogradHook,
                      public rpc::Layer,
                      public std::enable_shared_from_this<Runtime> {
 public:
  explicit Runtime(rpc::Agent& agent) : agent_(agent) {}

  /// Exposes the engine's functions and opens the channel.
  void install();
  static std::shared_ptr<Runtime> of(rpc::Agent& agent);

  /// Shared by those who read parameters, held by those who change them; see parameter_versions.h.
  ParameterLock parameters_lock;
  ParameterStreams parameter_streams;
  std::vector<std::weak_ptr<VersionKeeper>> version_keepers;  // guarded by parameters_lock

  uint64_t new_id();
  std::shared_ptr<ContextState> create();
  std::shared_ptr<ContextState> find(uint64_t id) const;
  /// Throws `invalid` for a context that has ended.
  std::shared_ptr<ContextState> find_or_create(uint64_t id);
  /// Forgets the context here and on all ranks that have heard of it from this one.
  void release(uint64_t id);
  /// Ends the pass here and there.
  void fail_pass(uint64_t context, uint64_t pass, const base::Error& error);

  uint64_t on_send(uint64_t context, int to, uint64_t answered,
                   const std::vector<at::Tensor>& tensors) override;
  void on_failed(uint64_t context, uint64_t autograd_id) override;
  void on_given_up(uint64_t context, int to, uint64_t call) override;
  void on_receive(uint64_t context, uint64_t autograd_id, int from,
                  std::vector<at::Tensor>& tensors,
                  const std::vector<bool>& requires_grad) override;
  at::Tensor hold(const at::Tensor& parameter) override;
  size_t live_contexts() const override;
  /// Its contexts end: who is held up in one hears why.
  void on_rank_lost(const rpc::Loss& loss) override;

 private:
  std::shared_ptr<ContextState> take_locked(uint64_t first_ended, uint64_t id);
  void on_message_on_loop(const rpc::ChannelMessage& message);
  void on_gradients(rpc::Decoder& in, const rpc::ReplyPtr& reply);
  void on_given_up_by(uint64_t context, int caller, uint64_t call);
  void throw_away(std::shared_ptr<const void> graph);
  void empty_trash();
  void tell(const ContextState& context, const rpc::ChannelTag& tag,
            std::shared_ptr<const wire::Bytes> payload, int but);

  rpc::Agent& agent_;
  rpc::Channel* channel_ = nullptr;
  std::atomic<uint64_t> counter_{0};
  mutable std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<ContextState>> contexts_;  // those of one maker side by side
  std::map<rpc::ProcessNumber, base::Error> lost_;  // what is late for their contexts makes none
  std::map<uint64_t, uint64_t> ended_;  // ranges of released contexts, by the last: the first
  // Contexts and nodes let go on the loop thread, where graphs and hooks of the user's must not be
  // destroyed: the next thread that works for any context does it.
  std::vector<std::shared_ptr<const void>> trash_;
};

/// The function that takes gradients for a send node.
inline constexpr const char* kGradientsFunction = "distrain.autograd.gradients";

}  // namespace distrain::autograd
