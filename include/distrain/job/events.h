#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "distrain/job/job.h"
#include "distrain/nn/evaluation.h"

namespace distrain::job {

// The fields of a job's JSON lines, declared once for the schema, the man pages and tests.

/// What losses are of: words have a perplexity, others an accuracy.
enum class Unit : uint8_t { kSamples, kWords };
/// The field that says how many there were.
const char* counted(Unit unit);

using nn::Evaluation;
/// loss, accuracy or perplexity, samples or words, and the job's own metrics; empty where there are
/// no samples.
Json fields_of(const Evaluation& evaluation, Unit unit);

/// As JSON has neither NaN nor infinity, a kNumber may be null, and so may one of kNumbers.
enum class FieldType {
  kFlag,
  kInteger,
  kNumber,
  kText,
  kIntegers,  ///< a list, as the next two
  kNumbers,
  kTexts,
  kNames,         ///< a text, or a list of them
  kNumberOrText,  ///< a number, or a word in its place
  kObject,        ///< with fields of its own
};

/// A field of a line, which every such line has unless it is `sometimes` there.
struct Field {
  std::string name;
  FieldType type = FieldType::kText;
  std::string what;           ///< what it is, with its unit where the name has none
  std::vector<Field> fields;  ///< of a kObject
  bool is_sometimes = false;
  bool is_nullable = false;
};
Field sometimes(Field field);
Field or_null(Field field);

/// A kind of line: its fields beside those of all (v, ts, run, event, cmd, rank, role).
struct Event {
  std::string name;
  std::string when;  ///< it comes; empty: more fields of an event that there is
  std::vector<Field> fields;
};

/// Those that any job prints: start, waiting, ready, ddp, checkpoint, warn, error, rank_end, end.
std::vector<Event> common_events();

/// A trainer's `step` lines, with more fields.
Event step_event(std::vector<Field> more);
/// How an evaluation went, and when there is one.
Event eval_event(std::string when, Unit unit = Unit::kSamples);

/// What a job prints whose trainers go through data in epochs, unless it says otherwise.
/// `may_lose`: it can go on without one of them.
std::vector<Event> trainer_events(bool may_lose, Unit unit = Unit::kSamples);

/// Adds a metric of a job's own to its `eval` lines and to `eval` of `end`. Throws `invalid` if
/// there are no such lines, or if they have a field of that name.
void add_metric(std::vector<Event>& events, const std::string& name, std::string what);

/// `events` with `more`, whose fields are added to such events; those of `end` to `rank_end`, too.
std::vector<Event> with_events(std::vector<Event> events, const std::vector<Event>& more);

}  // namespace distrain::job
