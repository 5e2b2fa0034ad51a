#pragma once

#include "distrain/job/checkpoints.h"

namespace distrain::job {

/// The tensors that a trainer contributes to a part of the checkpoint that is being saved.
struct HeldPart {
  PartName part;
  int32_t trainer = 0;
  Held tensors;
  static constexpr auto kFields =
      std::tuple(&HeldPart::part, &HeldPart::trainer, &HeldPart::tensors);
};

/// Exposes the functions by which rank 0 reads the tensors that other ranks hold. Must be called
/// before join().
void expose_held_parts(rpc::Agent& agent);

/// Adds the tensors of all parts to `content` under their stored names. Tensors of other ranks stay
/// there until they are read. `agent` is null if all tensors are in this process. Throws `internal`
/// if the name of a tensor does not belong to its part, or if two tensors have the same name.
void add_to_content(Content& content, std::vector<HeldPart> parts, rpc::Agent* agent,
                    EventSink& sink);

}  // namespace distrain::job
