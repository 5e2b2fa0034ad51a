#include <cstring>

#include <ATen/core/grad_mode.h>

#include "operations.h"

namespace distrain::collective {
namespace {

enum Step : int { kEnter = 0, kReduce = 1, kCollect = 2 };

// The part of a chunk that is reduced and then copied, from the cache, to the other outputs.
constexpr size_t kBlockBytes = size_t{16} << 10;

/// An allreduce or a barrier by marks in shared memory; see Note [Collectives in shared memory].
class SharedOperation final : public Operation {
 public:
  SharedOperation(const OpSpec& spec, base::TimePoint deadline, std::shared_ptr<SharedSpace> space,
                  bool is_direct, at::Tensor tensor)
      : Operation(spec, deadline, is_direct ? 2 : 3),
        space_(std::move(space)),
        is_direct_(is_direct),
        tensor_(std::move(tensor)) {}
  ~SharedOperation() override {
    if (slot_.waiting) leave();
  }

 private:
  size_t rank() const { return static_cast<size_t>(core().rank()); }
  bool is_in_place() const { return spec().kind == OpKind::kAllreduceInPlace; }
  bool reduces(int rank) const { return is_direct_ || rank < space_->reducers(); }
  bool has_marked(int phase, int rank) const {
    return slot_.marks[phase][static_cast<size_t>(rank)].load() == mark_;
  }
  uint8_t* slot_data(int rank) const { return space_->data_of(slot_, rank); }
  ByteRange chunk(int rank) const { return chunk_of(spec(), rank, space_->reducers()); }

  bool is_shared() const override { return true; }
  bool is_awaited(int) const override { return true; }
  // The other ranks wait for a rank that has not entered. A rank that does not reduce checks no
  // header, so a reducer tells the others if headers differ.
  bool tells_others() const override { return !has_entered_ ? !is_told_locked() : headers_differ_; }
  void watch(int step, bool begins) override {
    // In kEnter the marks belong to the operation before, whose waiters rely on messages.
    if (step == kEnter) return;
    slot_.watching[rank()].fetch_add(begins ? 1 : -uint64_t{1});
  }

  void on_open_locked() override {
    slot_ = space_->slot(sequence_of(number()), number());
    mark_ = number() - first_number(sequence_of(number())) + 1;
    previous_ = space_->enter(slot_, {mark_, weak_from_this()});
  }

  bool lacks(int step, int from) const override {
    const auto place = static_cast<size_t>(from);
    if (step == kEnter) return slot_.marks[SharedSpace::kDone][place].load() < previous_.mark;
    if (step == kReduce) return reduces(core().rank()) && !has_marked(0, from);
    return !has_marked(0, from) || (reduces(from) && !has_marked(1, from));
  }
  bool is_missing(int step, int from) const override {
    if (step == kEnter) {  // waits for what the operation before waits for
      const auto last = std::static_pointer_cast<SharedOperation>(previous_.operation.lock());
      if (last && !last->is_done()) return last->is_missing(last->step_locked(), from);
      return from != core().rank() && lacks(step, from);
    }
    if (step != kCollect || !has_marked(0, from)) return lacks(step, from);
    for (int other = 0; other < core().size(); ++other) {
      if (!has_marked(0, other)) return false;  // the reducers wait for that rank, too
    }
    return lacks(step, from);
  }

  void start() override {
    if (const auto last = previous_.operation.lock()) last->run_ready();
    look_if_waiting();
    if (lacks_any(kEnter)) {
      slot_.waiting->fetch_add(1);
      is_waiting_ = true;
    }
  }

  void run_step(int step) override {
    const at::NoGradGuard no_grad;
    if (step == kEnter) enter();
    if (step == kReduce && reduces(core().rank())) reduce_chunk();
    if (step == kCollect && !is_in_place()) collect();
    if (step != (is_direct_ ? kReduce : kCollect)) return;
    if (tensor_.defined() && !work_.is_same(tensor_)) tensor_.copy_(work_);
    // Other threads may hold this object for a while, but the caller may free the tensor.
    tensor_ = work_ = at::Tensor();
  }

  void enter() {
    stop_waiting();
    core().release_kept(slot_.index, previous_.mark);
    if (tensor_.defined()) work_ = tensor_.contiguous();
    encode_header(spec(), 0, space_->header_of(slot_, core().rank()).data());
    if (tensor_.defined() && !is_in_place()) {
      if (is_direct_) {
        copy({0, spec().bytes}, bytes_of(work_), slot_data(core().rank()));
      } else {
        for (int to = 0; to < space_->reducers(); ++to) {
          if (to != core().rank()) copy(chunk(to), bytes_of(work_), slot_data(core().rank()));
        }
      }
    }
    has_entered_ = true;
    set_mark(0);
  }

  void reduce_chunk() {
    std::vector<const uint8_t*> inputs;
    std::vector<uint8_t*> outputs;
    for (int from = 0; from < core().size(); ++from) {
      uint8_t* const theirs = input_of(from);
      inputs.push_back(from == core().rank() && tensor_.defined() ? bytes_of(work_) : theirs);
      if (is_in_place()) outputs.push_back(theirs);
    }
    if (!tensor_.defined()) return;
    if (is_direct_) {
      reduce(spec().reduce_op, spec().dtype, inputs, static_cast<size_t>(tensor_.numel()),
             bytes_of(work_));
      return;
    }
    if (!is_in_place()) outputs = {slot_data(core().rank()), bytes_of(work_)};
    // In place, the first output is also an input, which reduce() allows.
    const ByteRange all = chunk(core().rank());
    const size_t item = c10::elementSize(spec().dtype);
    for (const uint8_t*& input : inputs) input += all.begin;
    for (size_t at = all.begin; at < all.begin + all.size; at += kBlockBytes) {
      const size_t size = std::min(kBlockBytes, all.begin + all.size - at);
      reduce(spec().reduce_op, spec().dtype, inputs, size / item, outputs[0] + at);
      for (size_t i = 1; i < outputs.size(); ++i) copy({at, size}, outputs[0], outputs[i]);
      for (const uint8_t*& input : inputs) input += size;
    }
    set_mark(1);
  }

  void collect() {
    for (int from = 0; from < space_->reducers(); ++from) {
      if (from != core().rank()) copy(chunk(from), slot_data(from), bytes_of(work_));
    }
  }

  // Checks the header of group rank `from`, and returns its tensor in the shared memory.
  uint8_t* input_of(int from) {
    const auto theirs = decode_header(space_->header_of(slot_, from));
    auto error = theirs ? mismatch(from, *theirs) : std::nullopt;
    uint8_t* const input =
        theirs && is_in_place() ? space_->at(from, theirs->place, spec().bytes) : slot_data(from);
    if (!theirs || !input) {
      error = {
          base::ErrorKind::kProtocol,
          "a malformed header in shared memory of rank " + std::to_string(core().world_rank(from)),
          core().world_rank(from), describe(spec())};
    }
    if (!error) return input;
    headers_differ_ = !is_direct_ || space_->reducers() < core().size();
    throw base::Exception(std::move(*error));
  }

  static void copy(ByteRange range, const uint8_t* from, uint8_t* to) {
    if (range.size > 0) std::memcpy(to + range.begin, from + range.begin, range.size);
  }

  // Marks `phase`. If that completes the phase, wakes the ranks that need it and are not watching.
  void set_mark(int phase) {
    slot_.marks[phase][rank()].store(mark_);
    for (int other = 0; other < core().size(); ++other) {
      if ((phase == 0 || reduces(other)) && !has_marked(phase, other)) return;
    }
    for (int to = 0; to < core().size(); ++to) {
      const bool needs = phase == 1 || reduces(to);
      if (to == core().rank() || !needs || slot_.watching[static_cast<size_t>(to)] > 0) continue;
      core().send_look(to);
    }
  }

  void look_if_waiting() {
    if (*slot_.waiting > 0) core().look_later();
  }
  void stop_waiting() {
    if (std::exchange(is_waiting_, false)) slot_.waiting->fetch_sub(1);
  }
  void leave() {
    if (std::exchange(has_left_, true)) return;
    stop_waiting();
    space_->leave(slot_, mark_);
    look_if_waiting();
  }
  void on_end_locked() override {
    if (error_locked() && has_entered_ && is_in_place() && tensor_.defined()) {
      core().keep_locked(slot_.index, mark_, tensor_);
    }
    leave();
  }

  const std::shared_ptr<SharedSpace> space_;
  const bool is_direct_;
  at::Tensor tensor_;  // the caller's, until the last step has run
  at::Tensor work_;    // the same if that is contiguous
  SharedSpace::Slot slot_;
  uint64_t mark_ = 0;
  SlotUse previous_;  // the operation that this rank had in the slot before
  bool is_waiting_ = false;
  bool has_entered_ = false;
  bool headers_differ_ = false;  // and other ranks may not know
  bool has_left_ = false;
};

}  // namespace

std::shared_ptr<Operation> make_shared_operation(const OpSpec& spec, base::TimePoint deadline,
                                                 std::shared_ptr<SharedSpace> space, bool is_direct,
                                                 const at::Tensor& tensor) {
  return std::make_shared<SharedOperation>(spec, deadline, std::move(space), is_direct, tensor);
}

}  // namespace distrain::collective
