// Checks that the lines that a job prints match the declarations in distrain/job/events.h.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "distrain/base/error.h"
#include "distrain/job/events.h"
#include "distrain/job/job.h"

namespace distrain::testing {

inline bool has_type(const job::Json& value, job::FieldType type) {
  using enum job::FieldType;
  const auto all = [&value](job::FieldType of_items) {
    return value.is_array() && std::all_of(value.begin(), value.end(), [&](const job::Json& item) {
             return has_type(item, of_items);
           });
  };
  switch (type) {
    case kFlag:
      return value.is_boolean();
    case kInteger:
      return value.is_number_integer();
    case kNumber:
      return value.is_number() || value.is_null();
    case kText:
      return value.is_string();
    case kIntegers:
      return all(kInteger);
    case kNumbers:
      return all(kNumber);
    case kTexts:
      return all(kText);
    case kNames:
      return value.is_string() || all(kText);
    case kNumberOrText:
      return value.is_number() || value.is_string();
    case kObject:
      return value.is_object();
  }
  return false;
}

/// Returns how `object` differs from the `declared` fields, or an empty string.
inline std::string problem_of(const std::vector<job::Field>& declared, const job::Json& object) {
  for (const job::Field& field : declared) {
    const auto value = object.find(field.name);
    if (value == object.end()) {
      if (!field.is_sometimes) return "it lacks " + field.name;
    } else if (!(field.is_nullable && value->is_null()) && !has_type(*value, field.type)) {
      return field.name + " has another type: " + value->dump();
    } else if (field.type == job::FieldType::kObject) {
      if (const auto problem = problem_of(field.fields, *value); !problem.empty()) return problem;
    }
  }
  for (const auto& [name, value] : object.items()) {
    const auto is_it = [&name = name](const job::Field& field) { return field.name == name; };
    if (std::none_of(declared.begin(), declared.end(), is_it)) return "nobody declares " + name;
  }
  return {};
}

/// Throws `internal` if a line matches no declared event; this fails the job and its test.
inline void check_declared(const std::vector<job::Event>& events, std::string_view name,
                           const job::Json& fields) {
  const auto event = std::find_if(events.begin(), events.end(),
                                  [name](const job::Event& each) { return each.name == name; });
  const std::string problem =
      event == events.end() ? "nobody declares it" : problem_of(event->fields, fields);
  if (problem.empty()) return;
  throw base::Exception(base::ErrorKind::kInternal,
                        "line '" + std::string(name) + "': " + problem + ": " + fields.dump());
}

/// Checks the fields that a rank adds to its last line, as check_declared() does for a whole line.
inline void check_outcome(std::vector<job::Event> events, const job::Json& fields) {
  for (job::Event& event : events) {
    for (job::Field& field : event.fields) field.is_sometimes = true;
  }
  check_declared(events, "end", fields);
}

}  // namespace distrain::testing
