#pragma once

#include "distrain/job/step.h"

namespace distrain::job {

// A job declares its JSON lines by these types, for the schema, the man pages and the tests.

/// The unit of a job's examples. A job with kSamples reports accuracy, with kWords perplexity.
enum class Unit : uint8_t { kSamples, kWords };
const char* counted(Unit unit);  ///< returns the name of the unit: "samples" or "words"

/// Returns loss, accuracy and samples (kSamples) or loss, perplexity and words (kWords), and the
/// job's own metrics. Returns an empty object if there are no samples.
Json fields_of(const Evaluation& evaluation, Unit unit);

/// The type of a field. A kNumber may be null, because JSON has neither NaN nor infinity.
enum class FieldType {
  kFlag,
  kInteger,
  kNumber,
  kText,
  kIntegers,  ///< a list of integers; kNumbers and kTexts are lists, too
  kNumbers,
  kTexts,
  kNames,         ///< a text or a list of texts
  kNumberOrText,  ///< a number or a word
  kObject,        ///< an object with `fields`
};

/// A field of an event. Every line of the event has the field, unless `is_sometimes` is true.
struct Field {
  std::string name;
  FieldType type = FieldType::kText;
  std::string what;           ///< description, with the unit if the name does not have it
  std::vector<Field> fields;  ///< for kObject only
  bool is_sometimes = false;
  bool is_nullable = false;
};
Field sometimes(Field field);
Field or_null(Field field);

/// A kind of JSON line. `fields` omits v, ts, run, event, cmd, rank and role, which all lines have.
struct Event {
  std::string name;
  std::string when;  ///< when the line is printed; empty if `fields` extend an existing event
  std::vector<Field> fields;
};

/// Returns the events that every job may print: start, ready, checkpoint, warn, error, end, ….
std::vector<Event> common_events();

/// Returns the `step` event of trainers, with its usual fields and `more`.
Event step_event(std::vector<Field> more);
Event eval_event(std::string when, Unit unit = Unit::kSamples);
/// Returns the default events of a job whose trainers train in epochs. `may_lose` is true if the
/// job can continue after the loss of a trainer.
std::vector<Event> trainer_events(bool may_lose, Unit unit = Unit::kSamples);

/// Adds a job's own metric to the event `eval` and the field `eval` of `end`. Throws `invalid` if
/// there is no event `eval` or if it already has a field `name`.
void add_metric(std::vector<Event>& events, const std::string& name, std::string what);

/// Merges `more` into `events`: adds new events, and adds fields to existing events. Fields of
/// `end` are also added to `rank_end`.
std::vector<Event> with_events(std::vector<Event> events, const std::vector<Event>& more);

}  // namespace distrain::job
