// Begins passes and gives them up.
#include <utility>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "reducer_impl.h"

namespace distrain::ddp {

namespace {

Deliver into(const autograd::ContextRef& context) {
  return [context](const at::Tensor& parameter, const at::Tensor& mean) {
    context.set_gradient(parameter, mean);
  };
}

}  // namespace

void Reducer::Impl::begin_locked(uint64_t pass, const collective::PassNumber& number,
                                 int graph_task) {
  if (state_ != PassState::kIdle) {
    throw base::Exception(
        invalid("another backward pass over these parameters is under way; one at a time"));
  }
  send_owed_refusals_locked();
  transition_locked(PassState::kAccumulating);
  pass_ = pass;
  number_ = number;
  graph_task_ = graph_task;
  context_pass_ = 0;
  started_ = 0;
  failure_.reset();
  arrival_.clear();
  for (Bucket& bucket : buckets_) bucket.begin();
}

void Reducer::Impl::expect(const autograd::ContextRef& context) {
  uint64_t pass = 0;
  {
    std::lock_guard lock(mutex_);
    if (state_ == PassState::kIdle) send_owed_refusals_locked();
    std::erase_if(contexts_, [](const auto& item) {
      return item.second.context.ended() && item.second.expected == 0;
    });
    AnnouncedContext& announced =
        contexts_.try_emplace(context.id(), AnnouncedContext{context}).first->second;
    if (announced.expected != 0) return;
    pass = announced.expected = ++last_pass_;
    announced.count = {++announced_, 0};
  }
  context.on_pass_end(end_of(pass, into(context)));
}

// Returns the function that ends a pass. Gives up the pass if its last copy is destroyed uncalled.
std::function<void()> Reducer::Impl::end_of(uint64_t pass, Deliver deliver) {
  const std::weak_ptr<Impl> weak = weak_from_this();
  std::shared_ptr<void> open(nullptr, [weak, pass](void*) {
    if (const auto impl = weak.lock()) impl->give_up(pass, "failed before its end");
  });
  return [weak, pass, open = std::move(open), deliver = std::move(deliver)] {
    if (const auto impl = weak.lock()) impl->finish(pass, deliver);
  };
}

Reducer::Impl::AnnouncedContext* Reducer::Impl::expecting_locked(uint64_t pass) {
  for (auto& [id, announced] : contexts_) {
    if (announced.expected == pass) return &announced;
  }
  return nullptr;
}

// Returns the number of collectives of the current pass that have not started.
int Reducer::Impl::collectives_left_locked() const {
  const bool measures = measured_pass_ == 0 && buckets_.size() > 1;
  return static_cast<int>(buckets_.size() - started_) + (measures ? 1 : 0);
}

void Reducer::Impl::send_owed_refusals_locked() {
  started_ = 0;  // refuses all collectives of a pass
  for (const Error& error : std::exchange(owed_refusals_, {})) {
    group_->refuse(collectives_left_locked(), error);
  }
}

// If this thread's current context expects a pass, counts the current plain pass as that pass.
Reducer::Impl::AnnouncedContext* Reducer::Impl::answer_expectation_locked() {
  const auto it = contexts_.find(rpc::current_context());
  if (it == contexts_.end() || std::exchange(it->second.expected, 0) == 0) return nullptr;
  return &it->second;
}

collective::PassNumber Reducer::Impl::number_by(ForwardCount& count, uint64_t context) const {
  return {step_, count.forward, count.passes++, context};
}

void Reducer::Impl::on_accumulated(size_t index, const at::Tensor& variable) {
  std::lock_guard lock(mutex_);
  const int graph_task = torch::autograd::get_current_graph_task_id();
  if (state_ == PassState::kIdle || graph_task != graph_task_) {
    begin_locked(++last_pass_, {}, graph_task);
    if (AnnouncedContext* const announced = answer_expectation_locked()) {
      number_ = number_by(announced->count, announced->context.id());
    } else {
      number_ = number_by(plain_, 0);
      plain_numbered_ = plain_.forward;
    }
    torch::autograd::Engine::get_default_engine().queue_callback(end_of(pass_, nullptr));
  }
  store_locked(index, variable.grad());
}

void Reducer::Impl::on_context_gradient(size_t index, const autograd::ContextRef& context,
                                        const at::Tensor& gradient) {
  std::function<void()> end;  // before `lock`, so that it is destroyed without the lock
  std::lock_guard lock(mutex_);
  if (state_ != PassState::kIdle && context_pass_ == context.pass()) {
    return store_locked(index, gradient);
  }
  if (begin_of_context_locked(index, context, end)) store_locked(index, gradient);
}

// Returns false if the context's pass has failed: its end_of() has refused the collectives, and
// nothing would end a pass that begins now.
bool Reducer::Impl::begin_of_context_locked(size_t index, const autograd::ContextRef& context,
                                            std::function<void()>& end) {
  if (!context.runs()) return false;
  const auto it = contexts_.find(context.id());
  try {
    if (it == contexts_.end()) {
      throw base::Exception(invalid(
          "a pass of an autograd context reached parameter '" + names_[index] + "' on rank " +
          std::to_string(world_rank()) +
          ", but its gradients are not averaged: call the DistributedDataParallel's forward() in "
          "that context (not its module's), while training and with gradients enabled"));
    }
    uint64_t pass = it->second.expected;
    if (pass == 0) {
      pass = ++last_pass_;
      end = end_of(pass, into(context));
      if (!context.on_pass_end(end)) return false;
    }
    begin_locked(pass, {});
    it->second.expected = 0;
    number_ = number_by(it->second.count, context.id());
  } catch (const base::Exception& e) {
    // The other ranks wait for this rank's pass. If it is still expected, its end_of() refuses it.
    if (it == contexts_.end() && std::exchange(unannounced_, context.id()) != context.id()) {
      ++announced_;
      plain_.forward = plain_numbered_;  // drops plain forwards, which were meant for the context
    }
    if (it == contexts_.end() || it->second.expected == 0) {
      owed_refusals_.push_back(e.error());
      if (state_ == PassState::kIdle) send_owed_refusals_locked();
    }
    throw;
  }
  context_pass_ = context.pass();
  return true;
}

void Reducer::Impl::give_up(uint64_t pass, const char* why) {
  int left = 0;
  {
    std::lock_guard lock(mutex_);
    if (AnnouncedContext* const announced = expecting_locked(pass)) {
      announced->expected = 0;
      const bool ended = announced->context.ended();
      owed_refusals_.push_back(given_up_error(
          ended ? "never came: the autograd context of its forward pass ended without it" : why));
      if (!ended && state_ == PassState::kIdle) send_owed_refusals_locked();
      return;
    }
    if (pass != pass_ || state_ == PassState::kIdle || state_ == PassState::kFinalising) return;
    transition_locked(PassState::kFinalising);
    left = collectives_left_locked();
  }
  // Started allreduces go on, because other ranks may need this rank's data.
  group_->refuse(left, given_up_error(why));
  std::lock_guard lock(mutex_);
  for (Bucket& bucket : buckets_) bucket.drop();
  transition_locked(PassState::kIdle);
}

Error Reducer::Impl::given_up_error(const char* why) const {
  return Error{ErrorKind::kRemoteFailed,
               "the backward pass of rank " + std::to_string(world_rank()) + " " + why,
               world_rank(), "Reducer"};
}

}  // namespace distrain::ddp
