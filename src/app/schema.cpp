#include "program.h"

namespace distrain::app {
namespace {

using job::Event;
using job::Field;
using job::FieldType;

Json type_of(FieldType type) {
  static const Json kTypes = Json::parse(R"([{"type": "boolean"},
    {"type": "integer"}, {"type": ["number", "null"]}, {"type": "string"},
    {"type": "array", "items": {"type": "integer"}},
    {"type": "array", "items": {"type": ["number", "null"]}},
    {"type": "array", "items": {"type": "string"}},
    {"type": ["string", "array"], "items": {"type": "string"}}, {"type": ["number", "string"]},
    {"type": "object"}])");
  return kTypes.at(static_cast<size_t>(type));  // kTypes is in the order of the enumerators
}

void add_fields(Json& object, const std::vector<Field>& fields);

Json schema_of(const Field& field) {
  Json schema = type_of(field.type);
  Json& type = schema["type"];
  if (field.is_nullable && type != Json{"number", "null"}) {
    if (!type.is_array()) type = Json::array({type});
    type.push_back("null");
  }
  schema["description"] = field.what;
  if (field.type == FieldType::kObject) add_fields(schema, field.fields);
  return schema;
}

/// Adds `fields` to the schema of an object and forbids additional properties.
void add_fields(Json& object, const std::vector<Field>& fields) {
  object.emplace("properties", Json::object());  // keeps properties that are already present
  object.emplace("required", Json::array());
  for (const Field& field : fields) {
    object["properties"][field.name] = schema_of(field);
    if (!field.is_sometimes) object["required"].push_back(field.name);
  }
  object["additionalProperties"] = false;
}

FieldType type_of(const Option& option) {
  using enum FieldType;
  const bool is_number = option.kind == ValueKind::kReal || option.kind == ValueKind::kInteger;
  if (is_number && !option.choices.empty()) return kNumberOrText;
  constexpr FieldType kTypes[] = {kFlag, kInteger, kIntegers, kNumber, kText, kText};
  return kTypes[static_cast<size_t>(option.kind)];  // kTypes is in the order of the enumerators
}

/// Returns the JSON schema of the line of `event`. The caller adds the values of its field `cmd`.
Json line_of(const Event& event) {
  Json line{{"title", event.name}, {"description", event.when}, {"type", "object"}};
  add_fields(line, {{"v", FieldType::kInteger, "version of the format"},
                    {"ts", FieldType::kNumber, "time of the line in seconds since 1970"},
                    job::or_null({"run", FieldType::kText,
                                  "id of the run, the same on all ranks; null until they meet"}),
                    {"event", FieldType::kText, "kind of the line"},
                    {"cmd", FieldType::kText, "subcommand; null if none was given"},
                    job::or_null({"rank", FieldType::kInteger,
                                  "rank that printed the line; null for the launcher, or if the "
                                  "rank is not known yet"}),
                    job::or_null({"role", FieldType::kText,
                                  "role of the rank, or launcher; null if it is not known yet"})});
  Json& properties = line["properties"];
  properties["v"]["const"] = 1;
  properties["event"]["const"] = event.name;
  properties["cmd"].erase("type");
  properties["cmd"]["enum"] = Json();
  add_fields(line, event.fields);
  return line;
}

}  // namespace

std::vector<Event> events_of(const JobCommand& command) {
  std::vector<Event> events = job::with_events(job::common_events(), command.events);
  for (Event& event : events) {
    for (Field& field : event.fields) {
      for (const Option& option : command.table) {
        const bool is_shown =
            event.name == "config" ? option.scope != Scope::kInfo : is_job_option(option);
        const Field value = job::or_null({json_name(option), type_of(option), option.help});
        if (is_shown && field.name == "config") field.fields.push_back(value);
        if (is_shown && field.name == "origins")
          field.fields.push_back({value.name, FieldType::kText, "origin"});
      }
    }
  }
  return events;
}

std::vector<std::string> event_names(const Program& program) {
  std::vector<Event> events = job::common_events();
  for (const JobCommand& command : program.commands) {
    events = job::with_events(std::move(events), command.events);
  }
  std::vector<std::string> names;
  for (const Event& event : events) names.push_back(event.name);
  return names;
}

std::string schema(const Program& program, const std::string& only) {
  Json all = Json::array();
  for (const std::string& name : event_names(program)) {
    if (!only.empty() && name != only) continue;
    nlohmann::ordered_map<Json, Json> lines;  // schema of a line → commands that print it
    const auto add = [&](const std::vector<Event>& events, const Json& cmd) {
      for (const Event& event : events) {
        if (event.name == name) lines[line_of(event)].push_back(cmd);
      }
    };
    // If an error occurs before the command is known, `cmd` is null.
    if (name == "error" || name == "end") add(job::common_events(), nullptr);
    for (const JobCommand& command : program.commands) add(events_of(command), command.name);
    for (const auto& [line, cmds] : lines) {
      all.emplace_back(line)["properties"]["cmd"]["enum"] = cmds;
    }
  }
  const Json whole{{"$schema", "https://json-schema.org/draft/2020-12/schema"},
                   {"title", "JSON lines of " + program.name},
                   {"oneOf", std::move(all)}};
  return whole.dump(1) + '\n';
}

}  // namespace distrain::app
