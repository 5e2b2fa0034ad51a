#pragma once

#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "distrain/rpc/agent.h"
#include "distrain/rpc/named_tensors.h"
#include "distrain/rpc/rref.h"
#include "distrain/store/named_tensors.h"

namespace distrain::job {

/// The name and file of a part of a checkpoint.
struct PartName {
  std::string name;  ///< prefix of its tensors' names, as "fc" of "fc.weight"; empty: no prefix
  std::string file = "model";  ///< model, optimizer or state
  bool each_own = false;  ///< each trainer has a part of its own; otherwise the first one's is kept
  static constexpr auto kFields = std::tuple(&PartName::name, &PartName::file, &PartName::each_own);

  /// Returns true if the stored name `tensor` belongs to this part (of `trainer`, if `each_own`).
  bool has(const std::string& tensor, int trainer) const;
  /// Returns the name under which the checkpoint stores a tensor of `trainer`.
  std::string stored(const std::string& tensor, int trainer) const;
  bool operator==(const PartName&) const = default;
};

/// A snapshot of tensors, which nothing writes to. They are fetched while training continues.
struct Held {
  rpc::NamedTensors here;
  std::vector<rpc::RRef<rpc::NamedTensors>> elsewhere;  ///< tensors that other ranks hold
  std::vector<std::string> trained;                     ///< names of tensors that must be finite
  static constexpr auto kFields = std::tuple(&Held::here, &Held::elsewhere, &Held::trained);

  Held() = default;
  /// Adds the tensors that require a gradient to `trained`.
  Held(rpc::NamedTensors tensors);                       // NOLINT: implicit by design
  Held(std::vector<rpc::RRef<rpc::NamedTensors>> owned)  // NOLINT
      : elsewhere(std::move(owned)) {}

  /// Moves `here` to references in `elsewhere` that `agent` holds until they are fetched.
  void leave_at(rpc::Agent& agent);
};

/// A part of a checkpoint.
struct Part : PartName {
  bool once = false;  ///< the trainers share one object, which the first trainer saves and loads
  /// Takes a snapshot while all trainers wait; store::copies_on_host copies tensors that will
  /// change.
  std::function<Held(int trainer)> take;
  /// Loads saved tensors. Throws `bad_data` if they do not fit.
  std::function<void(int trainer, const rpc::NamedTensors& saved)> give;
};

/// Returns a part that saves `live` and loads it in place.
Part part_of(rpc::NamedTensors live, std::string file = "model");
/// Returns a part for each trainer's own tensors, which `live` returns at each save and load.
Part part_of_each(std::function<rpc::NamedTensors(int trainer)> live);
/// Returns a part with the model's vocabulary: named lists of words, which have no line breaks.
Part part_of_words(const std::map<std::string, std::vector<std::string>>& lists);

namespace detail {
template <class T>
Held hold_parameters(rpc::CallContext& call, const rpc::RRef<T>& object) {
  Held held(store::copies_on_host(object.local_value().named_parameters()));
  held.leave_at(call.agent);
  return held;
}
template <class T>
void give_parameters(const rpc::RRef<T>& object, const rpc::NamedTensors& saved) {
  store::copy_into(object.local_value().named_parameters(), saved);
}
}  // namespace detail

/// Enables Training::keep() for references to a T on another rank. T needs named_parameters(),
/// which returns rpc::NamedTensors. Call it on every rank before it joins.
template <class T>
void expose_parameters(rpc::Agent& agent, const std::string& name) {
  agent.expose<&detail::hold_parameters<T>>(name + ".hold_parameters");
  agent.expose<&detail::give_parameters<T>>(name + ".give_parameters");
}

}  // namespace distrain::job
