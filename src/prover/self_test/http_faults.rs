//! Faults between the socket and the router: requests and answers are changed on their way.

use cresset_qualification::ApiAnswer;
use cresset_qualification::testing::api_faults::{spoil_answer, spoil_call};
use cresset_qualification::testing::planted_faults::PlantedFault;
use cresset_transport::ChangedExchange;
use serde_json::Value;

/// An exchange with a fault.
pub(crate) struct SpoiledExchange(pub PlantedFault);

impl ChangedExchange for SpoiledExchange {
    fn request(&self, call: u64, body: &mut Value) {
        spoil_call(self.0, call, body);
    }

    fn answer(&self, asked: &Value, status: u16, answer: Vec<u8>) -> Vec<u8> {
        let mut answer = ApiAnswer { status, body: answer };
        spoil_answer(self.0, asked, &mut answer);
        answer.body
    }
}
