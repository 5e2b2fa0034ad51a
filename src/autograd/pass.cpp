#include "pass.h"

#include <c10/core/StreamGuard.h>
#include <c10/util/StringUtil.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "distrain/rpc/torch_state.h"
#include "runtime.h"

namespace distrain::autograd {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;

static void call_pre_hooks(Node& node, variable_list& grads) {
  for (const auto& hook : node.tensor_pre_hooks()) grads = (*hook)(grads);
  for (const auto& [output, hook] : node.retains_grad_hooks()) grads = (*hook)(grads);
  for (const auto& hook : node.pre_hooks()) grads = (*hook)(grads);
}

void Pass::prepare(const std::shared_ptr<ContextState>& context,
                   const std::vector<at::Tensor>& roots) {
  context_ = context;
  std::vector<Node*> to_visit;
  const auto depend_on = [&](Node* node) {
    const auto [it, is_new] = waiting_.try_emplace(node);
    ++it->second.dependencies;
    if (is_new) to_visit.push_back(node);
  };
  std::lock_guard lock(mutex_);
  for (const auto& send : context->sends()) {
    depend_on(send.get());
    ++sends_waiting_;
  }
  for (const at::Tensor& root : roots) {
    roots_.push_back(torch::autograd::impl::gradient_edge(root));
    depend_on(roots_.back().function.get());
  }
  while (!to_visit.empty()) {
    const Node* node = to_visit.back();
    to_visit.pop_back();
    for (const Edge& edge : node->next_edges()) {
      if (edge.is_valid()) depend_on(edge.function.get());
    }
  }
  nodes_left_ = waiting_.size();
  end_hooks_due_ = true;
}

base::Future<void> Pass::run_roots(const std::vector<at::Tensor>& roots) {
  const at::NoGradGuard no_grad;
  base::Future<void> done;
  {
    std::lock_guard lock(mutex_);
    done = done_.emplace(agent_.event_loop()).future();
    waker_.emplace(nullptr);
    for (size_t i = 0; i < roots.size(); ++i) {
      deliver_locked(roots_[i], at::ones_like(roots[i]), std::nullopt);
    }
    is_running_ = true;
  }
  run_ready();
  return done;
}

void Pass::receive(const std::shared_ptr<SendNode>& node, variable_list grads,
                   rpc::ReplyPtr reply) {
  if (grads.size() != node->num_inputs()) wire::Reader::fail("a wrong number of gradients");
  std::vector<std::optional<torch::autograd::InputMetadata>> metadata;
  for (uint32_t i = 0; i < node->num_inputs(); ++i) metadata.emplace_back(node->input_metadata(i));
  torch::autograd::validate_outputs(metadata, grads, [](const std::string& text) {
    return "a gradient that came from another rank: " + text;
  });
  torch::autograd::InputBuffer inputs(grads.size());
  for (uint32_t i = 0; i < node->num_inputs(); ++i) {
    add_gradient(inputs, *node, i, std::move(grads[i]), std::nullopt);
  }
  std::unique_lock lock(mutex_);
  const auto it = waiting_.find(node.get());
  std::optional<base::Error> failed = error_;
  if (!failed && (it == waiting_.end() || it->second.dependencies == 0)) {
    failed = base::Error{base::ErrorKind::kInvalid,
                         "a gradient for a tensor that was sent after backward() began, or twice",
                         agent_.rank()};
  }
  if (failed) {
    lock.unlock();
    return reply->fail(*failed);
  }
  it->second.dependencies = 0;
  --sends_waiting_;
  ready_.push_back({node, std::move(inputs)});
  std::push_heap(ready_.begin(), ready_.end());
  const bool acknowledge = waker_.has_value();
  if (!acknowledge) waker_ = reply;
  const bool run = !std::exchange(is_running_, true);
  lock.unlock();
  if (acknowledge)
    reply->send([](rpc::Encoder& encoder) { rpc::encode<PassReports>(encoder, {}); });
  if (run) run_ready();
}

void Pass::run_ready() {
  const base::TraceScope scope("backward");
  const at::NoGradGuard no_grad;
  const rpc::TorchState clean;  // restored after each node, because hooks may change torch's state
  const auto context = context_.lock();
  for (;;) {
    std::optional<Ready> next;  // unset if the end hooks are due
    {
      std::lock_guard lock(mutex_);
      if (!error_ && !ready_.empty()) {
        std::pop_heap(ready_.begin(), ready_.end());
        next = std::move(ready_.back());
        ready_.pop_back();
      } else if (!error_ && nodes_left_ == 0 && end_hooks_due_ && context) {
        end_hooks_due_ = false;
      } else {
        is_running_ = false;
        break;
      }
    }
    try {
      if (next) {
        execute(*std::move(next));
      } else {
        call_end_hooks(*context);
      }
    } catch (...) {
      // A non-distrain exception becomes `internal` on the initiator, else `remote_failed`.
      const auto otherwise =
          roots_.empty() ? base::ErrorKind::kRemoteFailed : base::ErrorKind::kInternal;
      fail(base::with_origin(rpc::error_in_flight(otherwise), agent_.rank(), "backward"));
    }
    clean.restore();
  }
  finish_if_idle();
}

// Calls the end hooks. Joins all streams, so that hooks can use all gradients in current streams.
void Pass::call_end_hooks(ContextState& context) {
  join_streams();
  for (const auto& hook : context.end_hooks_of(id_)) hook();
  std::lock_guard lock(mutex_);
  for (size_t i = 0, known = streams_.size(); i < known; ++i) {
    insert(streams_, rpc::current_stream(streams_[i].device()));
  }
}

void Pass::execute(Ready ready) {
  Node& node = *ready.node;
  const std::optional<c10::Stream> stream = stream_of(node);
  const c10::OptionalStreamGuard stream_guard(stream);
  await_inputs(ready.inputs, stream);
  variable_list grads = std::move(ready.inputs.buffer);
  variable_list outputs;
  if (auto* recv = dynamic_cast<RecvNode*>(&node)) {
    call_pre_hooks(node, grads);
    execute_recv(*recv, std::move(grads));
  } else if (dynamic_cast<torch::autograd::AccumulateGrad*>(&node)) {
    capture(node, std::move(grads));
  } else {
    call_pre_hooks(node, grads);
    if (!options_.retain_graph) node.will_release_variables();
    outputs = node(node.post_hooks().empty() ? std::move(grads) : variable_list(grads));
    if (!options_.retain_graph) node.release_variables();
    torch::autograd::validate_outputs(node.next_edges(), outputs, [&](const std::string& text) {
      return "backward of " + node.name() + ": " + text;
    });
    for (const auto& hook : node.post_hooks()) outputs = (*hook)(outputs, grads);
  }
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Edge& edge = node.next_edge(i);
    if (edge.is_valid()) deliver_locked(edge, std::move(outputs[i]), stream);
  }
  if (stream) insert(streams_, *stream);
  --nodes_left_;
}

void Pass::deliver_locked(const Edge& edge, at::Tensor gradient,
                          const std::optional<c10::Stream>& producer) {
  Node* node = edge.function.get();
  Waiting& waiting = waiting_.at(node);
  if (!waiting.inputs) waiting.inputs.emplace(node->num_inputs());
  add_gradient(*waiting.inputs, *node, edge.input_nr, std::move(gradient), producer);
  if (--waiting.dependencies > 0) return;
  ready_.push_back({edge.function, std::move(*waiting.inputs)});
  waiting.inputs.reset();
  std::push_heap(ready_.begin(), ready_.end());
}

void Pass::execute_recv(RecvNode& node, variable_list grads) {
  const auto context = context_.lock();
  if (!context || node.context != context->id()) {
    base::invalid("the roots depend on a tensor that came from rank " + std::to_string(node.from) +
                  " in another context");
  }
  {
    std::lock_guard lock(mutex_);
    ++unacknowledged_;
    returned_.insert(node.autograd_id);
  }
  const rpc::ContextScope outside(0);  // the backward pass itself is not recorded
  agent_
      .call_raw(rpc::To(node.from).timeout(options_.timeout), kGradientsFunction,
                [&](rpc::Encoder& encoder) {
                  encoder.out.put(context->id());
                  encoder.out.put(id_);
                  encoder.out.put(node.autograd_id);
                  encoder.out.put(options_.retain_graph);
                  encoder.out.put(static_cast<int64_t>(options_.timeout.count()));
                  rpc::encode<std::vector<at::Tensor>>(encoder, grads);
                })
      .on_complete(agent_.inline_executor(),
                   [self = shared_from_this()](base::Result<rpc::RawReply>& reply) {
                     self->on_acknowledged(reply);
                   });
}

// Runs on the loop thread, which is safe because an acknowledgement has no tensors.
void Pass::on_acknowledged(base::Result<rpc::RawReply>& reply) {
  const auto fail = [this](base::Error error) {
    // A worker fails the pass, because user hooks must not be destroyed on the loop thread. If the
    // thread pool has ended and drops the task, the destructor of `failing` fails the pass.
    std::shared_ptr<void> failing(nullptr,
                                  [self = shared_from_this(), error](void*) { self->fail(error); });
    agent_.executor().post([failing = std::move(failing)]() mutable { failing.reset(); });
  };
  if (!reply.ok()) return fail(reply.error());
  PassReports reports;
  try {
    reports = agent_.finish<PassReports>(reply.unchecked());
  } catch (...) {
    return fail(rpc::error_in_flight(base::ErrorKind::kProtocol));
  }
  {
    std::lock_guard lock(mutex_);
    --unacknowledged_;
    for (const auto& [rank, report] : reports) {
      PassReport& known = reports_[rank];
      if (report.version > known.version) known = report;
    }
  }
  finish_if_idle();
}

void Pass::capture(Node& accumulate, variable_list grads) {
  const at::Tensor& variable = static_cast<torch::autograd::AccumulateGrad&>(accumulate).variable;
  const auto context = context_.lock();
  if (!context) return;
  const rpc::ContextScope inside(agent_, context->id());  // hooks call ContextRef::current()
  call_pre_hooks(accumulate, grads);
  // If there are post-hooks, they get the gradient from `grads`, so the context stores a copy.
  at::Tensor gradient = accumulate.post_hooks().empty() ? std::move(grads[0]) : grads[0];
  if (gradient.defined()) {
    if (!context->accumulate(variable, std::move(gradient), id_)) return;
    announce(context, variable);
  }
  // Call post-hooks as torch's DistEngine does: without outputs, and even if there is no gradient.
  for (const auto& hook : accumulate.post_hooks()) (*hook)({}, grads);
}

void Pass::announce(const std::shared_ptr<ContextState>& context, const at::Tensor& variable) {
  const auto hooks = context->take_ready_hooks(id_, variable);
  auto* const post_hook = torch::autograd::impl::post_acc_grad_hooks(variable).get();
  if (hooks.empty() && !post_hook) return;
  auto* const leaf_hook = dynamic_cast<LeafHook*>(post_hook);
  if (hooks.empty() && !leaf_hook) {
    base::invalid(c10::str("a leaf of shape ", variable.sizes(),
                           " has a post-accumulate hook, which no pass of a context calls: use "
                           "Context::on_gradient_ready in its place"));
  }
  const at::Tensor total = context->gradient(variable);
  for (const auto& hook : hooks) hook(total);
  if (leaf_hook) leaf_hook->on_context_gradient(ContextRef(context, id_), total);
}

// If this rank is idle, sends the reply in `waker_`, or ends the pass if this is the initiator.
void Pass::finish_if_idle() {
  rpc::ReplyPtr waker;
  std::optional<base::Promise<void>> done;
  PassReports reports;
  {
    std::lock_guard lock(mutex_);
    if (!waker_ || error_ || is_running_ || !ready_.empty() || unacknowledged_ > 0) return;
    waker = *std::exchange(waker_, std::nullopt);
    reports_[agent_.rank()] = {++version_, sends_waiting_};
    reports = reports_;
    if (!waker) done.swap(done_);
  }
  if (waker) {
    waker->send([&](rpc::Encoder& encoder) { rpc::encode<PassReports>(encoder, reports); });
    return;
  }
  done->complete(outcome_of(reports));
}

/// Returns an error if `reports` count send nodes without a gradient. Called on the initiator.
base::Status Pass::outcome_of(PassReports reports) const {
  // Name another rank if possible: without that rank's gradients, this rank could send none either.
  std::string what;
  for (const auto& [rank, report] : reports) {
    if (report.waiting == 0 || (!what.empty() && rank == agent_.rank())) continue;
    what = fmt::format("{} of the messages that rank {} sent", report.waiting, rank);
  }
  if (what.empty()) return base::Unit{};
  const auto context = context_.lock();
  // Name the last call whose result got no gradient, because that result is nearest to the loss.
  for (const auto& [id, from, function] : context ? context->results() : CallResults()) {
    if (reports[from].waiting == 0 || returned_.contains(id)) continue;
    what =
        fmt::format("the result of {} on rank {} ({})", function, from, agent_.worker(from).name);
  }
  return base::Error{
      base::ErrorKind::kInvalid,
      fmt::format("no gradient for {}: the loss of rank {} ({}) does not depend on it; use the "
                  "result of each call in the loss, or make the call under an at::NoGradGuard",
                  what, agent_.rank(), agent_.name()),
      agent_.rank(), "backward"};
}

void Pass::fail(const base::Error& error) {
  if (const auto context = context_.lock()) {
    context->fail_pass(id_, error);
  } else {
    end(error);
  }
}

void Pass::end(const base::Error& error, const std::function<void()>& between) {
  std::optional<rpc::ReplyPtr> waker;
  std::optional<base::Promise<void>> done;
  std::vector<Ready> dropped;
  {
    std::lock_guard lock(mutex_);
    if (!error_) error_ = error;
    waker.swap(waker_);
    done.swap(done_);
    dropped.swap(ready_);
  }
  if (waker && *waker) (*waker)->fail(error);
  if (between) between();
  if (done) done->fail(error);
}

}  // namespace distrain::autograd
