#include <algorithm>

#include "distrain/app/program.h"

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
    {"type": ["string", "array"], "items": {"type": "string"}}, {"type": "object"}])");
  return kTypes.at(static_cast<size_t>(type));  // in the order in which they are declared
}

void add_fields(Json& object, const std::vector<Field>& fields);

Json schema_of(const Field& field) {
  Json schema = type_of(field.type);
  if (field.is_nullable) {
    Json& type = schema["type"];
    if (!type.is_array()) type = Json::array({type});
    if (std::find(type.begin(), type.end(), "null") == type.end()) type.push_back("null");
  }
  schema["description"] = field.what;
  if (field.type == FieldType::kObject) add_fields(schema, field.fields);
  return schema;
}

/// Closed: an object with these fields and no others.
void add_fields(Json& object, const std::vector<Field>& fields) {
  if (!object.contains("properties")) {
    object["properties"] = Json::object();
    object["required"] = Json::array();
  }
  for (const Field& field : fields) {
    object["properties"][field.name] = schema_of(field);
    if (!field.is_sometimes) object["required"].push_back(field.name);
  }
  object["additionalProperties"] = false;
}

FieldType type_of(ValueKind kind) {
  if (kind == ValueKind::kFlag) return FieldType::kFlag;
  if (kind == ValueKind::kInteger) return FieldType::kInteger;
  if (kind == ValueKind::kIntegers) return FieldType::kIntegers;
  return kind == ValueKind::kReal ? FieldType::kNumber : FieldType::kText;
}

std::vector<Field> config_fields(const OptionTable& table) {
  std::vector<Field> fields;
  for (const Option& option : table) {
    if (!is_job_option(option)) continue;
    fields.push_back(job::or_null({json_name(option), type_of(option.kind), option.help}));
  }
  return fields;
}

/// A line of one event, of the commands that print it alike; null among them: there was none.
Json variant(const Event& event, const Json& cmds) {
  Json line{{"title", event.name}, {"description", event.when}, {"type", "object"}};
  add_fields(line, {{"v", FieldType::kInteger, "version of the format"},
                    {"ts", FieldType::kNumber, "when it was written, in seconds since 1970"},
                    job::or_null({"run", FieldType::kText,
                                  "id of the run, the same on all ranks; null where rank 0 is yet "
                                  "to tell it, and of a launcher without rank 0"}),
                    {"event", FieldType::kText, "what kind of line it is"},
                    {"cmd", FieldType::kText, "the subcommand; null where none was named"},
                    job::or_null({"rank", FieldType::kInteger, "whose line; null: the launcher's"}),
                    job::or_null({"role", FieldType::kText, "of the rank; null: not known yet"})});
  Json& properties = line["properties"];
  properties["v"]["const"] = 1;
  properties["event"]["const"] = event.name;
  properties["cmd"].erase("type");
  properties["cmd"]["enum"] = cmds;
  add_fields(line, event.fields);
  return line;
}

}  // namespace

std::vector<Event> events_of(const JobCommand& command) {
  std::vector<Event> events = job::with_events(job::common_events(), command.events);
  for (Event& event : events) {
    for (Field& field : event.fields) {
      if (field.name == "config") {
        field.fields = config_fields(command.table);
      }
    }
  }
  return events;
}

std::vector<std::string> event_names(const Program& program) {
  std::vector<std::string> names;
  const auto add = [&names](const std::vector<Event>& events) {
    for (const Event& event : events) {
      if (std::find(names.begin(), names.end(), event.name) == names.end()) {
        names.push_back(event.name);
      }
    }
  };
  add(job::common_events());
  for (const JobCommand& command : program.commands) add(command.events);
  return names;
}

std::string schema(const Program& program, const std::string& only) {
  Json lines = Json::array();
  for (const std::string& name : event_names(program)) {
    if (!only.empty() && name != only) continue;
    std::vector<std::pair<Event, Json>> variants;  // with the commands that print it so
    const auto add = [&](const std::vector<Event>& events, const Json& cmd) {
      for (const Event& event : events) {
        if (event.name != name) continue;
        const Json shape = variant(event, {});
        const auto same = std::find_if(variants.begin(), variants.end(), [&](const auto& other) {
          return variant(other.first, {}) == shape;
        });
        if (same == variants.end()) {
          variants.emplace_back(event, Json::array({cmd}));
        } else {
          same->second.push_back(cmd);
        }
      }
    };
    // What goes wrong before a command is known.
    if (name == "error" || name == "end") add(job::common_events(), nullptr);
    for (const JobCommand& command : program.commands) add(events_of(command), command.line.name);
    for (const auto& [event, cmds] : variants) lines.push_back(variant(event, cmds));
  }
  return Json{{"$schema", "https://json-schema.org/draft/2020-12/schema"},
              {"title", "the JSON lines of " + program.name},
              {"oneOf", std::move(lines)}}
             .dump(1) +
         '\n';
}

}  // namespace distrain::app
