//! JSON schemas of the types that documents of the node show.

use crate::{AccountStatus, AttemptState, CredentialKind, FailureCode, FinishReason, Microcredits};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use std::borrow::Cow;

impl JsonSchema for Microcredits {
    fn schema_name() -> Cow<'static, str> {
        "Units".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "Microcredits, a whole number up to 9007199254740991. One credit is 1000000 of them.",
            "type": "string",
            "pattern": "^(0|[1-9][0-9]{0,15})$",
        })
    }
}

/// A schema with one word for each variant, spelled as the variant is written in JSON.
macro_rules! words {
    ($($name:ident [$($variant:ident),+] $({ $($more:tt)+ })?;)+) => {$(
        impl JsonSchema for $name {
            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({ "type": "string", "enum": [$(Self::$variant),+] $(, $($more)+)? })
            }
        }
    )+};
}

words! {
    AccountStatus [Active, Suspended];
    CredentialKind [ApiKey, AccessToken];
    AttemptState [Queued, Running, Completed, Cancelled, Failed];
    FinishReason [Stop, Length, ToolCalls];
    FailureCode [
        GenerationFailed, NodeRestarted, DeadlineExceeded, Overloaded, Draining,
        ControlPlaneUnavailable, FormatTooCostly
    ] {
        "description": "Why an attempt failed, as clients may see it. All but format_too_costly are on the node's side, and charge nothing."
    };
}
