// Messages as they come off the wire: bytes to tensors and back.
#pragma once

#include <optional>

#include "../target.h"
#include "distrain/rpc/message.h"

namespace distrain::fuzz {

/// Reads a frame as the runtime does. Lengths in its header that do not fit its bytes are made to:
/// otherwise hardly any changed frame would get further. Nothing for what is refused; ends the
/// program if a tensor is not of the frame's own bytes.
std::optional<rpc::InMessage> read_frame(Input input);

/// All of a frame's bytes. `message` has tensors on the CPU only.
Bytes frame_bytes(rpc::OutMessage message, wire::FrameHeader header);

}  // namespace distrain::fuzz
