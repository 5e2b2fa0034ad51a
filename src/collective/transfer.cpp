#include "calls.h"
#include "operations.h"

namespace distrain::collective {

uint32_t Core::transfer_sequence_locked(const TransferKey& key) {
  const auto count = static_cast<uint32_t>(transfers_.size());
  if (count == kMostTransferSequences && !transfer_sequences_.contains(key)) return 0;
  const auto [it, is_new] = transfer_sequences_.try_emplace(key, kTransfers + count);
  if (is_new) transfers_.push_back(key);
  return it->second;
}

rpc::ChannelTag Core::wire_tag(uint64_t number, int step) const {
  rpc::ChannelTag tag{group_id_, number, static_cast<uint64_t>(step)};
  if (!is_transfer(number)) return tag;
  const TransferKey key = transfer_of(number);
  tag.b = number - first_number(sequence_of(number)) + first_number(kTransfers);
  tag.c |= uint64_t{key.tag} << 32 | uint64_t{key.sends} << 8;
  return tag;
}

bool Core::to_own_number_locked(int from, rpc::ChannelTag& tag) {
  const bool peer_sends = (tag.c >> 8 & 1) != 0;
  const uint32_t sequence =
      transfer_sequence_locked({from, !peer_sends, static_cast<uint32_t>(tag.c >> 32)});
  tag.b = tag.b - first_number(sequence_of(tag.b)) + first_number(sequence);
  tag.c &= 0xff;
  return sequence != 0;
}

namespace {

/// A send or a recv. The recv sends its header; then the send, which waits for it, sends the data.
/// If the send fails, it refuses the recv.
class Transfer final : public Operation {
 public:
  Transfer(const OpSpec& spec, base::TimePoint deadline, bool sends, int peer, at::Tensor tensor)
      : Operation(spec, deadline), sends_(sends), peer_(peer), tensor_(std::move(tensor)) {}

 private:
  bool expects(int, int from) const override { return from == peer_; }
  size_t expected_bytes(int, int) const override { return sends_ ? 0 : spec().bytes; }
  bool is_awaited(int) const override { return sends_; }
  bool tells_others() const override { return sends_; }

  void start() override {
    if (!sends_) return core().send_to_all(number(), 0, pack(core(), spec(), {}));
    if (!core().meet(peer_)) core().send_look(peer_);  // see Note [Closing a group]
  }
  void run_step(int step) override {
    if (!sends_) return write_tensor(tensor_, input(step, peer_));
    core().send_to_all(number(), 0, pack(core(), spec(), tensor_));
  }

  const bool sends_;
  const int peer_;
  const at::Tensor tensor_;
};

}  // namespace

Pending Backend::transfer(bool sends, const at::Tensor& tensor, int peer, int tag,
                          std::chrono::milliseconds timeout) {
  const char* const name = sends ? "send" : "recv";
  sends ? check_tensor(name, tensor) : check_result(name, tensor);
  if (peer < 0 || peer >= size_ || peer == rank_) {
    refuse_call(name, ": rank ", peer, " is not another rank of the group");
  }
  const OpSpec spec = spec_of(OpKind::kTransfer, tensor, tag);
  const uint32_t sequence = core_->transfer_sequence({peer, sends, spec.root});
  if (sequence == 0) refuse_call(name, ": the group has used a million pairs of rank and tag");
  const auto operation = std::make_shared<Transfer>(spec, deadline(timeout), sends, peer, tensor);
  core_->issue(operation, sequence);
  return Pending(operation);
}

c10::intrusive_ptr<c10d::Work> Backend::send(std::vector<at::Tensor>& tensors, int to, int tag) {
  if (tensors.size() != 1) refuse_call("send", ": needs one tensor");
  return make_work(rank_, c10d::OpType::SEND, send(tensors[0], to, tag), tensors);
}

c10::intrusive_ptr<c10d::Work> Backend::recv(std::vector<at::Tensor>& tensors, int from, int tag) {
  if (tensors.size() != 1) refuse_call("recv", ": needs one tensor");
  return make_work(rank_, c10d::OpType::RECV, recv(tensors[0], from, tag), tensors);
}

}  // namespace distrain::collective
