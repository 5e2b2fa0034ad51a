#include "distrain/rpc/autograd_hook.h"

#include "distrain/rpc/agent.h"

namespace distrain::rpc {

namespace {

thread_local const ContextScope* t_scope = nullptr;

}  // namespace

const ContextScope* ContextScope::current() {
  // A callback of the loop is not part of what the thread that happens to run the loop does.
  if (base::thread_state().must_not_wait) return nullptr;
  const ContextScope* scope = t_scope;
  while (scope && scope->ended_ && *scope->ended_) scope = scope->outer_;
  return scope;
}
uint64_t current_context() {
  const ContextScope* const scope = ContextScope::current();
  return scope ? scope->context_ : 0;
}
AutogradHook* current_autograd() {
  const ContextScope* const scope = ContextScope::current();
  return scope ? scope->autograd_ : nullptr;
}
ContextScope::ContextScope(AutogradHook* autograd, uint64_t context,
                           std::shared_ptr<const std::atomic<bool>> ended)
    : outer_(t_scope), autograd_(autograd), context_(context), ended_(std::move(ended)) {
  t_scope = this;
}
ContextScope::ContextScope(const Agent& agent, uint64_t context)
    : ContextScope(agent.autograd_hook().get(), context) {}
ContextScope::ContextScope(uint64_t context) : ContextScope(current_autograd(), context) {}
ContextScope::~ContextScope() { t_scope = outer_; }
bool ContextScope::is_innermost() const { return t_scope == this; }

}  // namespace distrain::rpc
