//! The rights that an operator's token may have.

use serde::{Deserialize, Serialize};

/// What an operator's token allows. Every token may read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Lists, the status, the log of acts.
    Read,
    /// Accounts, keys, requests and models; nothing that changes a balance.
    Operate,
    /// Grants, debits, budgets and prices.
    Money,
}

impl Role {
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Operate => "operate",
            Self::Money => "money",
        }
    }
}
