//! The form of a section of the configuration. Each part of the node defines the sections that it
//! uses, and the node composes them.

/// Defines a section: each field with its documentation, its bounds and its default. The crate that
/// uses it depends on `serde` and `schemars`.
#[macro_export]
macro_rules! section {
    (
        $(#[$about:meta])*
        pub struct $section:ident {
            $($(#[$attribute:meta])* pub $field:ident: $type:ty = $default:expr,)+
        }
    ) => {
        $(#[$about])*
        #[derive(Clone, Debug, PartialEq)]
        #[derive(::serde::Serialize, ::serde::Deserialize, ::schemars::JsonSchema)]
        #[serde(default, deny_unknown_fields)]
        pub struct $section {
            $($(#[$attribute])* pub $field: $type,)+
        }

        impl Default for $section {
            fn default() -> Self {
                Self { $($field: $default),+ }
            }
        }
    };
}
