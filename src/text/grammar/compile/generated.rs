//! Schemas in the shapes that generators write: Pydantic's `model_json_schema`, Zod's
//! `toJSONSchema`, OpenAPI 3.0 and 3.1. Each is accepted, and its grammar tells a text of it from
//! one that is none.

use super::tests::writes;
use crate::AnswerFormat;
use crate::grammar::CheckedSchema;
use crate::testing::{byte_level, text_model};

const TREE: &str = r##"{"$defs":{"Node":{"properties":{"value":{"title":"Value","type":"integer"},
    "children":{"default":[],"items":{"$ref":"#/$defs/Node"},"title":"Children","type":"array"}},
    "required":["value"],"title":"Node","type":"object"}},"$ref":"#/$defs/Node"}"##;
const PETS: &str = r##"{"$defs":{"Cat":{"properties":{"kind":{"const":"cat","title":"Kind","type":"string"},
    "lives":{"title":"Lives","type":"integer"}},"required":["kind","lives"],"title":"Cat","type":"object"},
    "Dog":{"properties":{"kind":{"const":"dog","title":"Kind","type":"string"},"name":{"title":"Name",
    "type":"string"}},"required":["kind","name"],"title":"Dog","type":"object"}},"properties":{"pet":{
    "discriminator":{"mapping":{"cat":"#/$defs/Cat","dog":"#/$defs/Dog"},"propertyName":"kind"},
    "oneOf":[{"$ref":"#/$defs/Cat"},{"$ref":"#/$defs/Dog"}],"title":"Pet"}},"required":["pet"],
    "title":"Owner","type":"object"}"##;
const INHERITED: &str = r##"{"allOf":[{"$ref":"#/components/schemas/Base"},{"type":"object",
    "properties":{"name":{"type":"string"}},"required":["name"]}],"components":{"schemas":{"Base":{
    "type":"object","properties":{"id":{"type":"integer","format":"int64"}},"required":["id"]}}}}"##;
const ZOD_EMAIL: &str = r#"{"type":"string","format":"email","pattern":"^(?!\\.)(?!.*\\.\\.)([A-Za-z0-9_'+\\-\\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\\-]*\\.)+[A-Za-z]{2,}$"}"#;
const COLORS: &str = r##"{"$defs":{"Color":{"enum":["red","blue"],"title":"Color","type":"string"}},
    "properties":{"by":{"additionalProperties":{"type":"integer"},"propertyNames":{"$ref":"#/$defs/Color"},
    "title":"By","type":"object"},"best":{"$ref":"#/$defs/Color","description":"the best"}},
    "required":["best"],"type":"object"}"##;
const CONDITION: &str = r#"{"type":"object","properties":{"kind":{"enum":["a","b"]},"x":{"type":"integer"}},
    "required":["kind"],"if":{"properties":{"kind":{"const":"a"}}},"then":{"required":["x"]}}"#;

const ENDLESS_MEMBER: &str = r##"{"type":"object","properties":{"x":{"$ref":"#/$defs/a"},"y":{"type":"integer"}},
    "$defs":{"a":{"type":"object","properties":{"x":{"$ref":"#/$defs/a"}},"required":["x"]}}}"##;

/// A schema, a text of it, and one that is none.
const SCHEMAS: [(&str, &str, &str); 66] = [
    // Records, options, nulls.
    (
        r#"{"properties":{"name":{"title":"Name","type":"string"},"age":{"title":"Age","type":"integer"}},"required":["name","age"],"title":"User","type":"object"}"#,
        r#"{"name":"A","age":3}"#,
        r#"{"name":"A","age":3,"more":1}"#,
    ),
    (
        r#"{"properties":{"nick":{"anyOf":[{"type":"string"},{"type":"null"}],"default":null,"title":"Nick"}},"type":"object"}"#,
        r#"{"nick":null}"#,
        r#"{"nick":1}"#,
    ),
    (
        r#"{"properties":{"size":{"anyOf":[{"type":"number"},{"type":"null"}]}},"required":["size"],"type":"object"}"#,
        r#"{"size":-1.5e3}"#,
        r#"{"size":1.12345678901234567}"#,
    ),
    (r#"{"type":["integer","null"]}"#, "12345678901234567890", "123456789012345678901"),
    (r#"{"type":["string","number","null"]}"#, "0.5", "true"),
    (r#"{"type":"integer"}"#, "-12345678901234567890", "123456789012345678901"),
    (r#"{"type":"number"}"#, "1234567890123456.1234567890123456e12", "12345678901234567"),
    (r#"{"type":"integer","minimum":1}"#, "9223372036854774784", "12345678901234567890"),
    (r#"{"type":"number","minimum":0.5}"#, "12.12345678", "12.123456789"),
    (
        r#"{"$schema":"https://json-schema.org/draft/2020-12/schema","type":"object","properties":{"a":{"type":"string"},"b":{"type":"number"}},"required":["a"],"additionalProperties":false}"#,
        r#"{"a":"","b":1}"#,
        r#"{"b":1}"#,
    ),
    (
        r#"{"type":"object","properties":{"a":{"type":"string","nullable":true}},"required":["a"]}"#,
        r#"{"a":null}"#,
        r#"{"a":1}"#,
    ),
    (r#"{"type":"string","enum":["x","y"],"nullable":true}"#, "null", r#""z""#),
    (
        r##"{"properties":{"a":{"allOf":[{"$ref":"#/components/schemas/A"}],"nullable":true}},"required":["a"],"components":{"schemas":{"A":{"type":"boolean"}}}}"##,
        r#"{"a":null}"#,
        r#"{"a":0}"#,
    ),
    (r#"{"type":"string","nullable":false}"#, r#""a""#, "null"),
    // Values.
    (r#"{"enum":["red","green"],"title":"Color","type":"string"}"#, r#""red""#, r#""blue""#),
    (r#"{"enum":[1,2],"type":"integer"}"#, "2", "3"),
    (r#"{"const":9007199254740993}"#, "9007199254740993", "9007199254740992"),
    (
        r#"{"enum":[9007199254740993,9007199254740995],"type":"integer"}"#,
        "9007199254740995",
        "9007199254740994",
    ),
    (
        r#"{"enum":[9007199254740992,"x",9007199254740993,18446744073709551615]}"#,
        "18446744073709551615",
        "18446744073709551616",
    ),
    (
        r#"{"anyOf":[{"const":18446744073709551615},{"type":"null"},{"const":-9007199254740993}]}"#,
        "-9007199254740993",
        "-9007199254740992",
    ),
    (
        r#"{"const":{"id":9007199254740993,"of":[1,123456789012345678901234567890]}}"#,
        r#"{"id":9007199254740993,"of":[1,123456789012345678901234567890]}"#,
        r#"{"id":9007199254740993,"of":[1,123456789012345678901234567891]}"#,
    ),
    (
        r#"{"type":"object","properties":{"id":{"type":"integer","minimum":9007199254740993}},"required":["id"]}"#,
        r#"{"id":9007199254740993}"#,
        r#"{"id":9007199254740992}"#,
    ),
    (
        r#"{"type":"integer","minimum":18446744073709551614,"maximum":18446744073709551615}"#,
        "18446744073709551614",
        "18446744073709551613",
    ),
    (
        r#"{"type":"integer","minimum":0,"maximum":18446744073709551615}"#,
        "18446744073709551615",
        "18446744073709551616",
    ),
    (
        r#"{"type":["integer","null"],"exclusiveMinimum":9007199254740992}"#,
        "9007199254740993",
        "9007199254740992",
    ),
    (
        r#"{"type":"integer","minimum":-9007199254740991,"maximum":9007199254740991}"#,
        "-9007199254740991",
        "9007199254740992",
    ),
    (
        r#"{"type":"number","minimum":-1.7976931348623157e308,"maximum":1.7976931348623157e308}"#,
        "1.5",
        "x",
    ),
    (r#"{"const":0.12345678901234567890123}"#, "0.12345678901234567890123", "0.12345678901234568"),
    // Formats.
    (r#"{"format":"path","type":"string"}"#, r#""/tmp""#, "1"),
    (r#"{"format":"password","type":"string","writeOnly":true}"#, r#""s""#, "null"),
    (r#"{"format":"base64","type":"string","contentEncoding":"base64"}"#, r#""QUI=""#, r#""QUI""#),
    (r#"{"format":"ipvanyaddress","type":"string"}"#, r#""10.0.0.1""#, r#""10.0.0.256""#),
    (r#"{"format":"uri-reference","type":"string"}"#, r#""a/b""#, "1"),
    (r#"{"format":"int64","type":"integer"}"#, "7", "7.5"),
    (r#"{"format":"double","type":"number"}"#, "7.5", r#""7""#),
    (r#"{"format":"uint64","minimum":0,"type":"integer"}"#, "7", "-7"),
    (
        r#"{"format":"date-time","type":"string"}"#,
        r#""2024-02-29T20:00:00.123456789Z""#,
        r#""2024-02-29T20:00:00.1234567890Z""#,
    ),
    (r#"{"format":"time","type":"string"}"#, r#""20:00:00.5+01:00""#, r#""25:00:00Z""#),
    (r#"{"format":"duration","type":"string"}"#, r#""P1DT2H""#, r#""P""#),
    (ZOD_EMAIL, r#""a.b@example.org""#, r#""a..b@example.org""#),
    (r#"{"type":"string","format":"starts_with","pattern":"^ab.*"}"#, r#""abc""#, r#""bc""#),
    (r#"{"type":"string","format":"includes","pattern":"ab"}"#, r#""xabx""#, r#""xax""#),
    (r#"{"type":"string","format":"lowercase","pattern":"^[^A-Z]*$"}"#, r#""ab""#, r#""aB""#),
    (
        r#"{"type":"string","format":"nanoid","pattern":"^[a-zA-Z0-9_-]{21}$"}"#,
        r#""abcdefghijklmnopqrstu""#,
        r#""abc""#,
    ),
    (r#"{"type":"string","format":"cuid2","pattern":"^[0-9a-z]+$"}"#, r#""a1""#, r#""A1""#),
    (
        r#"{"type":"string","format":"ulid","pattern":"^[0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{26}$"}"#,
        r#""01ARZ3NDEKTSV4RRFFQ69G5FAV""#,
        r#""01""#,
    ),
    (r#"{"type":"string","format":"jwt"}"#, r#""a.b.c""#, "1"),
    (
        r#"{"type":"string","format":"e164","pattern":"^\\+[1-9]\\d{6,14}$"}"#,
        r#""+4930123456""#,
        r#""030123456""#,
    ),
    (
        r#"{"type":"string","format":"cidrv4","pattern":"^((25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])\\.){3}(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])\\/([0-9]|[1-2][0-9]|3[0-2])$"}"#,
        r#""10.0.0.0/8""#,
        r#""10.0.0.0/33""#,
    ),
    (
        r#"{"type":"string","format":"emoji","pattern":"^(\\p{Extended_Pictographic}|\\p{Emoji_Component})+$"}"#,
        r#""😀""#,
        r#""a""#,
    ),
    (
        r#"{"type":"string","format":"date","pattern":"^20\\d\\d-.*$"}"#,
        r#""2024-01-31""#,
        r#""1999-01-31""#,
    ),
    (r#"{"type":"string","format":"time","pattern":"^20:"}"#, r#""20:00:00Z""#, r#""21:00:00Z""#),
    // Rules about members and items.
    (
        r#"{"type":"object","propertyNames":{"type":"string"},"additionalProperties":{"type":"number"}}"#,
        r#"{"a":1}"#,
        r#"{"a":"1"}"#,
    ),
    (
        r#"{"type":"object","propertyNames":{"type":"string","enum":["a","b"]},"additionalProperties":{"type":"number"},"required":["a"]}"#,
        r#"{"a":1,"b":2}"#,
        r#"{"a":1,"c":2}"#,
    ),
    (
        r#"{"type":"object","propertyNames":{"pattern":"^[a-z]+$"},"additionalProperties":{"type":"boolean"}}"#,
        r#"{"ab":true}"#,
        r#"{"AB":true}"#,
    ),
    (COLORS, r#"{"by":{"red":1},"best":"blue"}"#, r#"{"by":{"green":1},"best":"blue"}"#),
    (
        r#"{"type":"object","properties":{"a":{"type":"string"},"b":{"not":{}}},"required":["a"]}"#,
        r#"{"a":"x"}"#,
        r#"{"a":"x","b":1}"#,
    ),
    (
        r#"{"items":{"enum":["r","w"],"type":"string"},"type":"array","uniqueItems":true}"#,
        r#"["r","w"]"#,
        r#"["r","r"]"#,
    ),
    (r#"{"type":"array","items":{"type":"string"},"uniqueItems":false}"#, r#"["a","a"]"#, "[1]"),
    (
        r#"{"maxItems":2,"minItems":2,"prefixItems":[{"type":"string"},{"type":"integer"}],"type":"array"}"#,
        r#"["a",1]"#,
        r#"["a"]"#,
    ),
    (CONDITION, r#"{"kind":"a","x":1}"#, r#"{"kind":"a"}"#),
    // References.
    (ENDLESS_MEMBER, r#"{"y":1}"#, r#"{"x":{"x":{}}}"#),
    (
        TREE,
        r#"{"value":1,"children":[{"value":2,"children":[]}]}"#,
        r#"{"value":1,"children":[{}]}"#,
    ),
    (PETS, r#"{"pet":{"kind":"dog","name":"Rex"}}"#, r#"{"pet":{"kind":"dog","lives":9}}"#),
    (INHERITED, r#"{"id":1,"name":"a"}"#, r#"{"id":1,"name":"a","more":2}"#),
    (
        r#"{"type":"object","additionalProperties":true,"properties":{"a":{"type":"integer"}}}"#,
        r#"{"a":1,"b":2}"#,
        r#"{"a":"x"}"#,
    ),
];

#[test]
fn generated_schemas_are_accepted_and_kept_to() {
    let text = text_model(&byte_level());
    let mut failed = Vec::new();
    for (schema, valid, invalid) in SCHEMAS {
        let checked = CheckedSchema::of(schema, false);
        if let Err(why) = &checked {
            failed.push(format!("{schema}: {why}"));
            continue;
        }
        match text.compile(&AnswerFormat::Schema(schema.into())) {
            Err(why) => failed.push(format!("{schema}: {why}")),
            Ok(grammar) => {
                for (written, expect) in [(valid, true), (invalid, false)] {
                    if writes(&text, &grammar, written) != expect {
                        failed.push(format!("{schema}: {written} should be {expect}"));
                    }
                }
            }
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// Schemas of tools as servers of tools send them, with the places of what is left out.
#[test]
fn loosened_schemas_are_compiled_without_what_cannot_be_kept_to() {
    let text = text_model(&byte_level());
    for (member, left_out) in [
        (r#"{"type":"object","propertyNames":{"format":"uuid"}}"#, "/propertyNames"),
        (r#"{"type":"string","format":"uri-reference"}"#, "/format"),
        (r#"{"type":"string","format":"date-time"}"#, ""),
        (r#"{"not":{"pattern":"x"}}"#, "/not"),
        (r#"{"type":"array","uniqueItems":true}"#, "/uniqueItems"),
        (r#"{"type":"array","items":{"enum":[1,2]},"uniqueItems":true}"#, ""),
        (r#"{"type":"string","nullable":true}"#, ""),
        (r#"{"if":{"minimum":1},"then":{"pattern":"(?=x)"}}"#, "/if"),
        (r#"{"oneOf":[{"minimum":1},{"maximum":9}]}"#, "/oneOf"),
        (r#"{"$ref":"https://example.org/schema"}"#, "/$ref"),
        (r##"{"$ref":"#/$defs/none"}"##, "/$ref"),
        (r#"{"type":"string","pattern":"a(?=b)"}"#, "/pattern"),
        (r#"{"dependentRequired":{"a":["b"]}}"#, "/dependentRequired"),
    ] {
        let schema = format!(r#"{{"type":"object","properties":{{"a":{member}}}}}"#);
        let checked = CheckedSchema::of(&schema, true).unwrap();
        let place = (!left_out.is_empty()).then(|| format!("/properties/a{left_out}"));
        assert_eq!(checked.ignored, Vec::from_iter(place), "{member}");
        let again = CheckedSchema::of(&checked.text, false).unwrap();
        assert!(again.ignored.is_empty(), "{member}");
        assert!(text.compile(&AnswerFormat::Schema(checked.into())).is_ok(), "{member}");
    }
}
