//! The form of a section of the configuration. Each part of the node defines the sections that it
//! uses, and the node composes them.

#[doc(hidden)]
pub use {schemars, serde};

/// Defines a section: each field with its documentation, its bounds and its default.
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
        #[derive($crate::settings::serde::Serialize, $crate::settings::serde::Deserialize)]
        #[derive($crate::settings::schemars::JsonSchema)]
        #[serde(crate = "::cresset_base::settings::serde", default, deny_unknown_fields)]
        #[schemars(crate = "::cresset_base::settings::schemars")]
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
