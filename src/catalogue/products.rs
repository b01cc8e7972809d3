//! The algorithms of a device's products, which stand in the records of a release.

use super::{Catalogue, Result};
use cresset_qualification::{Hardware, Suite, Verdict};
use std::collections::BTreeSet;

impl Catalogue {
    /// Those that a release was last proven with on this hardware, or that a run was interrupted
    /// with, which goes on. Empty if there are none. What was not signed here counts for nothing.
    pub fn products(&self, name: &str, hardware: &Hardware) -> Result<BTreeSet<String>> {
        let runs = [self.kept_run(name, Suite::Quick)?, self.kept_run(name, Suite::Full)?];
        let records = self.records(name)?.into_iter();
        let proven = records.filter(|record| record.verdict == Verdict::Qualified);
        let identities = runs.into_iter().flatten().map(|run| run.identity);
        let mut hosts = identities.chain(proven.map(|record| record.identity)).map(|id| id.host);
        let found = hosts.find(|host| host.hardware == *hardware && !host.products.is_empty());
        Ok(found.map(|host| host.products).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cresset_qualification::testing::records;
    use cresset_qualification::{Record, UnfinishedRun};
    use std::fs;

    fn with(verdict: Verdict, products: &[&str]) -> Record {
        let mut record = records::of(verdict);
        record.identity.host.products = products.iter().map(|line| (*line).to_owned()).collect();
        record
    }

    #[test]
    fn a_release_keeps_the_algorithms_that_it_was_proven_with() {
        let data = tempfile::tempdir().unwrap();
        let catalogue = Catalogue::new(data.path());
        let here = records::of(Verdict::Qualified).identity.host.hardware;
        let found = |hardware: &Hardware| -> Vec<String> {
            catalogue.products("fake", hardware).unwrap().into_iter().collect()
        };
        assert_eq!(found(&here), [""; 0]);
        catalogue.save_record(&with(Verdict::Qualified, &["a 1"])).unwrap();
        // Another build takes them over; a proof that failed gives none, nor does one without any.
        let mut other = with(Verdict::Qualified, &["a 2"]);
        other.identity.host.engine.executable_sha256 = "another build".into();
        let last = catalogue.save_record(&other).unwrap();
        catalogue.save_record(&with(Verdict::Failed, &["a 3"])).unwrap();
        catalogue.save_record(&with(Verdict::Qualified, &[])).unwrap();
        assert_eq!(found(&here), ["a 2"]);
        assert_eq!(found(&Hardware { model: "n".into(), ..here.clone() }), [""; 0]);
        // Another choice in a record that was signed: nothing of it counts.
        let text = fs::read_to_string(&last).unwrap();
        fs::write(&last, text.replacen("\"payload\": \"", "\"payload\": \"e30", 1)).unwrap();
        assert_eq!(found(&here), ["a 1"]);

        let identity = with(Verdict::Qualified, &["a 4"]).identity;
        let run = UnfinishedRun::begin(identity, records::scope(Suite::Full), None);
        catalogue.keep_unfinished_run(&run).unwrap();
        assert_eq!(found(&here), ["a 4"], "its results were computed with them");
    }
}
