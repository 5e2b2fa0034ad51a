#include "operations.h"

namespace distrain::collective {

namespace {

class PlannedExchange final : public Operation {
 public:
  PlannedExchange(const OpSpec& spec, base::TimePoint deadline, int rank, ExchangePlan plan)
      : Operation(spec, deadline), rank_(rank), plan_(std::move(plan)) {}

 private:
  const at::Tensor& sent_to(int to) const { return plan_.sends[static_cast<size_t>(to)]; }
  const at::Tensor& output_of(int from) const { return plan_.outputs[static_cast<size_t>(from)]; }

  bool expects(int, int other) const override {
    const auto root = static_cast<int>(spec().root);
    return other != rank_ && (!plan_.rooted || rank_ == root || other == root);
  }
  size_t expected_bytes(int, int from) const override {
    const at::Tensor& output = plan_.result.defined() ? plan_.result : output_of(from);
    return output.defined() ? output.nbytes() : 0;
  }
  size_t sent_bytes(int to) const override {
    return sent_to(to).defined() ? sent_to(to).nbytes() : 0;
  }

  void start() override {
    // Copy the own data too, because the caller's inputs and outputs may share memory.
    own_ = packed(rank_);
    core().send_each([&](int to) {
      if (expects(0, to)) core().send(to, number(), 0, packed(to));
    });
  }
  // Returns the message for group rank `to`. Ranks that get the same tensor share a message.
  base::BufferPtr packed(int to) {
    if (!packed_ || !packed_tensor_.is_same(sent_to(to))) {
      packed_tensor_ = sent_to(to);
      packed_ = pack(core(), spec(), packed_tensor_);
    }
    return packed_;
  }

  void run_step(int) override {
    std::vector<const uint8_t*> inputs;
    for (int from = 0; from < core().size(); ++from) {
      const bool is_own = from == rank_;
      if (is_own ? !sent_to(rank_).defined() : expected_bytes(0, from) == 0) {
        inputs.push_back(nullptr);  // not read: there is no data, or no element
        continue;
      }
      const std::span<const uint8_t> data =
          is_own ? std::span<const uint8_t>(own_->data, own_->size).subspan(kHeaderBytes)
                 : input(0, from);
      if (!plan_.result.defined() && output_of(from).defined()) write_tensor(output_of(from), data);
      inputs.push_back(data.data());
    }
    const at::Tensor& result = plan_.result;
    if (!result.defined()) return;
    const bool is_contiguous = result.is_contiguous();
    const base::BufferPtr buffer = is_contiguous ? nullptr : core().allocate(result.nbytes());
    uint8_t* const out = is_contiguous ? bytes_of(result) : buffer->data;
    reduce(spec().reduce_op, spec().dtype, inputs, static_cast<size_t>(result.numel()), out);
    if (!is_contiguous) write_tensor(result, {out, result.nbytes()});
  }

  const int rank_;
  const ExchangePlan plan_;
  base::BufferPtr own_;
  at::Tensor packed_tensor_;  // of the last message
  base::BufferPtr packed_;
};

}  // namespace

std::shared_ptr<Operation> make_exchange(const OpSpec& spec, base::TimePoint deadline, int rank,
                                         ExchangePlan plan) {
  return std::make_shared<PlannedExchange>(spec, deadline, rank, std::move(plan));
}

}  // namespace distrain::collective
