// Converts received bytes to messages with tensors, and back.
#pragma once

#include <optional>

#include "../target.h"
#include "distrain/rpc/message.h"

namespace distrain::fuzz {

/// Reads a frame as the runtime does. First corrects lengths in the header that do not match the
/// input, because otherwise hardly any mutated frame would pass the first checks. Returns nullopt
/// if the frame is refused. Aborts the program if a tensor is outside of the frame's memory.
std::optional<rpc::InMessage> read_frame(Input input);

/// Returns all bytes of a frame. The tensors of `message` must be on the CPU.
Bytes frame_bytes(rpc::OutMessage message, wire::FrameHeader header);

}  // namespace distrain::fuzz
