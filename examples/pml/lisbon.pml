<prompt schema="trip">
  <traveller name="Nora" days="two"/>
  <lisbon><lisbon-food/></lisbon>
  <budget/>
  <user>What is the room of Pepper One?</user>
</prompt>
