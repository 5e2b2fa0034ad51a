"""check_lines.py SCHEMA FILE...: reports each JSON line of a job that does not match `distrain schema`.

Supports the parts of JSON Schema that `distrain schema` uses: type, const, enum, properties, required,
additionalProperties, items, and oneOf over the events. Ignores all other lines of a file, and a truncated last line,
whose writer was killed."""
import json
import sys

IS = {
    "null": lambda v: v is None,
    "boolean": lambda v: isinstance(v, bool),
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "number": lambda v: isinstance(v, (int, float)) and not isinstance(v, bool),
    "string": lambda v: isinstance(v, str),
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
}


def problems(value, schema, where):
    types = schema.get("type", list(IS))
    if not any(IS[name](value) for name in ([types] if isinstance(types, str) else types)):
        yield f"{where} is {json.dumps(value)[:60]}, not of type {types}"
    elif "const" in schema and value != schema["const"]:
        yield f"{where} is {value}, not {schema['const']}"
    elif "enum" in schema and value not in schema["enum"]:
        yield f"{where} is {value}, not one of {schema['enum']}"
    elif isinstance(value, list):
        for item in value:
            yield from problems(item, schema["items"], f"an item of {where}")
    elif isinstance(value, dict):
        for name in schema["required"]:
            if name not in value:
                yield f"{where} lacks {name}"
        for name, field in value.items():
            if name in schema["properties"]:
                yield from problems(field, schema["properties"][name], name)
            elif schema["additionalProperties"] is False:
                yield f"{where} has {name}, which is not in the schema"


def problems_of_line(line, schema):
    def is_of(kind):
        kind = kind["properties"]
        return kind["event"]["const"] == line["event"] and line.get("cmd") in kind["cmd"]["enum"]

    kinds = [kind for kind in schema["oneOf"] if is_of(kind)]
    if len(kinds) != 1:
        return [f"{len(kinds)} kinds of line in the schema are {line['event']} of {line.get('cmd')}"]
    return list(problems(line, kinds[0], line["event"]))


def main(schema_path, *paths):
    with open(schema_path, encoding="utf-8") as file:
        schema = json.load(file)
    told = set()  # problems already reported, because each is reported once
    checked = 0
    for path in paths:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = [text for text in file if text.startswith('{"v":') and text.endswith("}\n")]
        for text in lines:
            try:
                found = problems_of_line(json.loads(text), schema)
            except (ValueError, KeyError) as error:
                found = [f"no line of a job: {error!r}"]
            checked += 1
            for problem in found:
                if problem not in told:
                    print(f"{problem}: {text[:400].rstrip()}")
                told.add(problem)
    if told:
        sys.exit(1)
    print(f"{checked} lines are as the schema says")


main(*sys.argv[1:])
