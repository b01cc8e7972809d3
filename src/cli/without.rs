//! Commands of parts that this program was built without. Each takes any arguments, refuses, and
//! names the feature that is missing.

use crate::support::output::{CommandError, CommandResult};
use clap::Args;
use cresset_node::NodeError;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Whatever the command takes
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    given: Vec<String>,
}

pub(crate) fn refused(asked: &str, feature: &str) -> CommandError {
    NodeError::without(feature, asked).into()
}

macro_rules! without {
    ($($command:ident: $feature:literal,)*) => {$(
        #[cfg(not(feature = $feature))]
        pub(crate) mod $command {
            pub(crate) use super::Arguments;
            use super::{CommandResult, refused};

            pub(crate) async fn run<C>(_: C, _: Arguments) -> CommandResult {
                Err(refused(concat!("cresset ", stringify!($command), " is given"), $feature))
            }
        }
    )*};
}

without! {
    bench: "bench",
    relay: "gateway",
}

#[cfg(not(feature = "prover"))]
pub(crate) mod qualify {
    pub(crate) use super::Arguments;
    use super::{CommandError, CommandResult, refused};
    use crate::support::context::Context;
    use cresset_node::Assembly;

    impl Arguments {
        #[expect(clippy::unused_self, reason = "a program with the prover has something to lower")]
        pub(crate) fn lower_priority(&self) {}
    }

    #[expect(clippy::unused_async, reason = "with the feature it waits")]
    pub(crate) async fn run(_: &Context, _: Arguments) -> CommandResult {
        Err(refused("cresset qualify is given", "prover"))
    }

    /// Fails where the release is not qualified already.
    #[expect(clippy::unused_async, reason = "with the feature it waits")]
    pub(crate) async fn ensure_qualified(
        _: &Context,
        assembly: &Assembly,
        release: &str,
    ) -> CommandResult {
        let manifest = assembly.catalogue().find(release)?;
        assembly.qualified(&manifest, &assembly.host()).map(drop).map_err(CommandError::new)
    }
}
